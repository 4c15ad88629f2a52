"""Tables: for the terminal and, the same ones, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table as RichTable

from .bars import bars
from .peers import PEERS
from .rank import FIRST, HELD, MEMORY, TRAINED, WARM
from .summary import LIMITS, Figure, Results
from .training import PRODUCTS

NOTHING = "–"
MIB = 2**20
COLUMNS_MIN = 150
REASON_CHARACTERS_MAX = 240


class Table(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one: the rounds are numbered on. They must be of the same machine and state."""
    first = reports[0]
    records = []
    base = 0
    for report in reports:
        for key, usual in (("state_bytes", None), ("tensors", None), ("products", PRODUCTS)):
            if report["options"].get(key, usual) != first["options"].get(key, usual):
                raise ValueError(f"these runs differ in {key}: they cannot be shown as one")
        if report["machine"]["cpu"] != first["machine"]["cpu"]:
            raise ValueError("these runs are of different machines")
        records += [record | {"round": record["round"] + base} for record in report["records"]]
        base += report["options"]["runs"]
    return first | {"records": records, "options": first["options"] | {"runs": base}}


def tables(report: dict[str, Any]) -> list[Table]:
    """Everything that was measured and whatever was not, for each number of ranks."""
    results = Results(report["records"])
    found = []
    for ranks in results.ranks():
        found += [
            _limits(results, ranks),
            _stalls(results, ranks),
            _saving(results, ranks),
            _training(results, ranks),
            _loading(results, ranks),
        ]
        found += [_bars(results, ranks, bool(report["options"]["tensors"])), _failures(results, ranks)]
    return [table for table in found if table.rows]


def show(report: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, COLUMNS_MIN)  # narrower, the tables cannot be read
    console.print(heading(report))
    for table in tables(report):
        shown = RichTable(*table.columns, title=table.title, title_justify="left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)


def markdown(report: dict[str, Any]) -> str:
    lines = [heading(report), ""]
    for table in tables(report):
        lines += [f"### {table.title}", "", f"| {' | '.join(table.columns)} |", "|---" * len(table.columns) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', '¦') for cell in row)} |" for row in table.rows]
        lines.append("")
    return "\n".join(lines)


def heading(report: dict[str, Any]) -> str:
    machine, options = report["machine"], report["options"]
    state = (
        f"{options['tensors']} small tensors" if options["tensors"] else f"{options['state_bytes'] / 2**30:.2f} GiB a rank"
    )
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{state}; {options['runs']} runs, seed {options['seed']}; medians, smallest and largest run behind them. "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}, {versions}."
    )


def text(found: Figure | None, scale: float = 1.0, digits: int = 3) -> str:
    if found is None:
        return NOTHING
    middle, low, high = (value * scale for value in found[:3])
    if found.runs == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _limits(results: Results, ranks: int) -> Table:
    names = {"memcpy": "memcpy into touched shared memory", "write": "O_DIRECT write + fdatasync"}
    names |= {"read_cold": "O_DIRECT read", "read_warm": "read from the page cache"}
    rows = [(title, text(results.figure(ranks, LIMITS, metric))) for metric, title in names.items()]
    return Table(f"{ranks} rank(s): the machine's limits for the same bytes, s", ("limit", "s"), tuple(rows))


def _stalls(results: Results, ranks: int) -> Table:
    columns = ("", "save(), first", "save(), warm", "staged, first", "staged, warm", "staged, warm ÷ memcpy")
    rows = []
    for name in _saved(results, ranks):
        staged = (name, f"{WARM}.staged")
        cells = [
            text(results.figure(ranks, name, f"{kind}.{metric}")) for metric in ("save", "staged") for kind in (FIRST, WARM)
        ]
        rows.append((PEERS[name].title, *cells, text(results.ratio(ranks, staged, (LIMITS, "memcpy")), digits=2)))
    return Table(f"{ranks} rank(s): how long a save stops the trainer, s", columns, tuple(rows))


def _saving(results: Results, ranks: int) -> Table:
    columns = ("", "durable, first", "durable, warm", "limit ÷ durable, warm", "extra memory, MiB", "values checked")
    rows = []
    for name in _saved(results, ranks):
        durable = (name, f"{WARM}.durable")
        cells = [text(results.figure(ranks, name, f"{kind}.durable")) for kind in (FIRST, WARM)]
        cells += [text(results.ratio(ranks, (LIMITS, "write"), durable), digits=2)]
        cells += [text(results.figure(ranks, name, MEMORY), 1 / MIB, 0), _values(results, ranks, name)]
        rows.append((PEERS[name].title, *cells))
    return Table(f"{ranks} rank(s): until it is durable, s", columns, tuple(rows))


def _training(results: Results, ranks: int) -> Table:
    columns = ("", "save()", "durable", "time lost", "÷ memcpy", "a step without")
    rows = []
    for name in _saved(results, ranks):
        lost = (name, f"{TRAINED}.lost")
        cells = [text(results.figure(ranks, name, f"{TRAINED}.{metric}")) for metric in ("save", "durable", "lost")]
        cells += [text(results.ratio(ranks, lost, (LIMITS, "memcpy")), digits=2)]
        rows.append((PEERS[name].title, *cells, text(results.figure(ranks, name, f"{TRAINED}.step"))))
    return Table(f"{ranks} rank(s): training with a save under way, s", columns, tuple(rows))


def _loading(results: Results, ranks: int) -> Table:
    other = 3 - ranks
    columns = ("", "warm", "cold", "held in memory", f"{ranks}→{other}, warm", f"{ranks}→{other}, cold", "values checked")
    rows = []
    for name, way in results.loads(ranks):
        cells = [text(results.figure(ranks, name, f"load.{way}.{kind}")) for kind in (WARM, "cold")]
        cells.append(text(results.figure(ranks, name, HELD)))
        cells += [text(results.figure(ranks, name, f"reshard.{way}.{kind}")) for kind in (WARM, "cold")]
        rows.append((way, *cells, _values(results, ranks, name)))
    return Table(f"{ranks} rank(s): loading, s", columns, tuple(rows))


def _bars(results: Results, ranks: int, small: bool) -> Table:
    verdicts = {True: "met", False: "missed"}
    rows = [
        (bar.text, text(bar.measured), verdicts[bar.kept]) for bar in bars(results, ranks, small) if bar.kept is not None
    ]
    return Table(f"{ranks} rank(s): the bars", ("bar", "measured", ""), tuple(rows))


def _failures(results: Results, ranks: int) -> Table:
    rows = []
    for name in (*results.peers(ranks), LIMITS):
        for reason, times in results.errors(ranks, name).items():
            shown = " ".join(reason.split())[:REASON_CHARACTERS_MAX]
            rows.append((PEERS[name].title if name in PEERS else name, f"{times} run(s)", shown))
        for what, tensors in results.wrong(ranks, name).items():
            rows.append((PEERS[name].title, "WRONG VALUES", f"{what}: {tensors} tensors"))
    return Table(f"{ranks} rank(s): what failed", ("", "", "why"), tuple(rows))


def _saved(results: Results, ranks: int) -> list[str]:
    """In the order in which peers are declared; who failed stands there with nothing measured."""
    run = set(results.peers(ranks))
    return [name for name, spec in PEERS.items() if name in run and spec.saves]


def _values(results: Results, ranks: int, name: str) -> str:
    if results.wrong(ranks, name):
        return "WRONG"
    checked = results.checked(ranks, name)
    return f"{checked} tensors" if checked else NOTHING
