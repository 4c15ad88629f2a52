"""The page at `/`: runs at a glance, for a person with a browser. No script, nothing fetched from elsewhere."""

from __future__ import annotations

from html import escape
from urllib.parse import quote

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from holdfast_formats import rest

from .services import LIMIT_MAX, Wired

router = APIRouter(include_in_schema=False)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Holdfast</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root {{ color-scheme: light dark; --line: light-dark(#ddd, #444); --quiet: light-dark(#666, #999); }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }} th, td {{ padding: .4rem .8rem .4rem 0; text-align: left;
border-bottom: 1px solid var(--line); }} td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
small, th {{ color: var(--quiet); font-weight: normal; }} a {{ color: light-dark(#0550ae, #79b8ff); }}
</style></head><body><h1>Holdfast</h1><p><small>{version} · {root}</small></p>
<table><tr><th>Run<th class="n">Newest step<th class="n">Checkpoints<th class="n">Bytes<th class="n">Attempt</tr>
{rows}</table>
<p><a href="/docs">API</a> · <a href="/v1/runs">JSON</a> · <a href="/v1/rounds">rounds</a> ·
<a href="/metrics">metrics</a></p>
</body></html>
"""


@router.get("/", response_class=HTMLResponse)
def index(services: Wired) -> HTMLResponse:
    runs = services.catalog.runs(None, LIMIT_MAX).items
    rows = "".join(map(_row, runs)) or '<tr><td colspan="5"><small>No run has been saved here yet.</small></tr>'
    page = _PAGE.format(version=escape(services.version), root=escape(services.root), rows=rows)
    return HTMLResponse(page, headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"})


def _row(run: rest.Run) -> str:
    link = f'<a href="/v1/runs/{quote(run.name, safe="")}/checkpoints">{escape(run.name)}</a>'
    numbers = ["–" if run.newest is None else str(run.newest), str(run.checkpoints), _bytes(run.bytes), str(run.attempt)]
    return f"<tr><td>{link}" + "".join(f'<td class="n">{number}' for number in numbers) + "</tr>\n"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"
