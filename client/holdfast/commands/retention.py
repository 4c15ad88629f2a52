"""`holdfast keep`: show or set the retention policy of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from holdfast.config import default_url
from holdfast.terminal import completion, console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.errors import InvalidRequest, NoSuchRun

if TYPE_CHECKING:
    from holdfast.rest.api import Api
    from holdfast_formats.rest.retention import Best, Preview, RetentionPolicy

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_FORMS = {
    "weights": "as weights only (--full)",
    "exact": "with masters as low bits (--optim exact)",
    "bf16": "with optimizer states as bf16 (--optim bf16)",
    "int8": "as int8 (--optim int8)",
}
_MEASURE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run.", autocompletion=completion.runs)]
Last = Annotated[int | None, typer.Option("--last", metavar="N", help="Keep the newest N.")]
EverySteps = Annotated[int | None, typer.Option("--every-steps", metavar="N", help="Keep steps that are multiples of N.")]
StepsApart = Annotated[int | None, typer.Option("--steps-apart", metavar="N", help="Keep one every N steps or more.")]
Every = Annotated[
    str | None,
    typer.Option("--every", metavar="TIME", help="Keep one per time span or more, such as 30s, 10min, 6h, 1d, 2w."),
]
Within = Annotated[
    str | None, typer.Option("--within", metavar="TIME", help="Keep checkpoints committed in the last 6h, 3d, …")
]
BestBy = Annotated[
    list[str] | None,
    typer.Option("--best", metavar="METRIC:N[:max]", help="Keep the N with the lowest (or highest) metric; repeatable."),
]
Steps = Annotated[list[int] | None, typer.Option("--step", metavar="STEP", help="Keep this step; repeatable.")]
Full = Annotated[
    int | None,
    typer.Option("--full", metavar="N", help="Thin checkpoints older than the newest N whole ones to their weights."),
]
Optim = Annotated[
    Literal["exact", "bf16", "int8"] | None,
    typer.Option("--optim", help="Compact older checkpoints: optimizer states as bf16 or int8, or exact."),
]
OptimFull = Annotated[
    int | None, typer.Option("--optim-full", metavar="N", help="With --optim: the newest N stay exactly as saved.")
]
Quota = Annotated[
    str | None, typer.Option("--quota", metavar="BYTES", help="Refuse saves beyond this size of the run, such as 2TB.")
]
KeepAll = Annotated[bool, typer.Option("--all", help="Keep everything: remove all rules.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; print what would be kept and removed, and why.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def keep(  # noqa: PLR0913 — one option a rule
    run: Run,
    last: Last = None,
    every_steps: EverySteps = None,
    steps_apart: StepsApart = None,
    every: Every = None,
    within: Within = None,
    best: BestBy = None,
    step: Steps = None,
    full: Full = None,
    optim: Optim = None,
    optim_full: OptimFull = None,
    quota: Quota = None,
    keep_all: KeepAll = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Set the retention policy of a run, or show it. A checkpoint stays if any rule, a pin or a label keeps it.

    The given rules replace the existing ones. Without any, the current rules and their verdicts are shown. A
    checkpoint replaces older ones only after it is verified, and the newest verified checkpoint always stays. With
    --full, older checkpoints that stay lose their optimizer state and masters: they can be loaded, but not resumed. With
    --optim, they keep both in fewer bytes, masters bit for bit: they can be resumed.
    """
    from rich.text import Text

    from holdfast.rest import retention
    from holdfast.rest.api import Api

    with console.reporting(as_json):
        rules = {
            "last": last,
            "every_steps": every_steps,
            "steps_apart": steps_apart,
            "every_seconds": parse_duration(every),
            "within_seconds": parse_duration(within),
            "best": [parse_best(text) for text in best or []] or None,
            "steps": step,
            "keep_full": full,
            "optim": optim,
            "optim_full": optim_full,
            "quota_bytes": parse_bytes(quota),
        }
        given = {name: value for name, value in rules.items() if value is not None}
        if keep_all and given.keys() - {"quota_bytes", "keep_full", "optim", "optim_full"}:
            raise InvalidRequest("--all keeps everything, so it cannot be combined with other rules")
        with _known_run(), Api(url or default_url()) as api:
            changes = bool(given or keep_all) and not dry_run
            if changes:
                shown = _change(api, run, _policy(given), (yes, as_json))
            else:
                shown = retention.preview(api, run, _policy(given) if given or keep_all else None)
    if as_json:
        console.print_json({"changed": changes, **shown.model_dump()})
    elif changes:
        console.out().print(Text.assemble(("set  ", "green"), _said(shown, "removed")))
    else:
        show(shown)


@contextmanager
def _known_run() -> Iterator[None]:
    """For a run that does not exist, say when it will, and what holds until then."""
    try:
        yield
    except NoSuchRun as error:
        hint = f"{error.hint}; a policy is for a run that has started; `holdfast serve --keep N` sets the default for others"
        raise NoSuchRun(error.detail, hint=hint) from error


def _change(api: Api, run: str, wanted: RetentionPolicy, how: tuple[bool, bool]) -> Preview:
    """Set the policy, after a confirmation if anything would be removed. Fails if it was changed in between."""
    from holdfast.rest import retention

    yes, as_json = how
    before = retention.policy(api, run)
    foreseen = retention.preview(api, run, wanted)
    goes = ["remove"] if any(not verdict.keep for verdict in foreseen.verdicts) else []
    thins = ["thin"] if any(verdict.thin for verdict in foreseen.verdicts) else []
    shrinks = ["compact"] if any(verdict.compact for verdict in foreseen.verdicts) else []
    if not yes and (goes or thins or shrinks):
        acts = " and ".join([*goes, *thins, *shrinks])
        if as_json:
            raise InvalidRequest(f"nothing was changed: this would {acts} checkpoints, and --json needs --yes for that")
        show(foreseen)
        question = f"{acts.capitalize()} these checkpoints in {api.url}, and later ones according to the rules?"
        console.confirm(question, "nothing was changed", as_json)
    return retention.set_policy(api, run, wanted, before.tag)


def show(preview: Preview) -> None:
    """A table of verdicts with their reasons, before anything is removed."""
    from holdfast_formats.rest import lists

    out = console.out()
    out.print(console.table_of(lists.verdicts(""), preview.verdicts))
    out.print(_said(preview, "would be removed"), markup=False)
    if preview.could_save:
        forms = [
            f"{console.human_bytes(size)} {_FORMS[form]}" for form, size in preview.could_save.items() if form in _FORMS
        ]
        out.print(f"keeping older ones in another form would free about {', '.join(forms)}", markup=False)


def _said(preview: Preview, removed_word: str) -> str:
    kept = sum(verdict.keep for verdict in preview.verdicts)
    removed = len(preview.verdicts) - kept
    rules = ", ".join(_rules(preview.policy)) or "everything"
    sizes = console.human_bytes(preview.bytes_kept), console.human_bytes(preview.bytes_removed)
    thin = sum(verdict.thin for verdict in preview.verdicts)
    saved = f", thinned: {thin} (saves {console.human_bytes(preview.bytes_thinned)})" if thin else ""
    if compact := sum(verdict.compact for verdict in preview.verdicts):
        saved += f", compacted: {compact} (saves about {console.human_bytes(preview.bytes_compacted)})"
    if preview.bytes_saved:
        saved += f", thinned or compacted before: {sum(v.thinned or v.compacted for v in preview.verdicts)}"
        saved += f" (saved {console.human_bytes(preview.bytes_saved)})"
    return f"kept: {kept} ({sizes[0]}), {removed_word}: {removed} ({sizes[1]}){saved}; the rules: {rules}"


def _policy(rules: dict[str, Any]) -> RetentionPolicy:
    from pydantic import ValidationError

    from holdfast_formats.body import first_mistake
    from holdfast_formats.rest.retention import RetentionPolicy

    try:
        return RetentionPolicy.model_validate(rules)
    except ValidationError as error:
        raise InvalidRequest(first_mistake(error, "rules"), hint="see `holdfast keep --help`") from error


def parse_duration(text: str | None) -> float | None:
    """6h -> 21600 seconds; `InvalidRequest` without a unit."""
    if text is None:
        return None
    match = _MEASURE.fullmatch(text.strip())
    if match is None or match[2] not in _SECONDS:
        raise InvalidRequest(f"{text!r} is not a time", hint=f"use a number and one of {', '.join(_SECONDS)}, such as 6h")
    return float(match[1]) * _SECONDS[match[2]]


def parse_bytes(text: str | None) -> int | None:
    """2TB -> 2 * 10**12, 2TiB -> 2 * 2**40; `InvalidRequest` for another unit."""
    if text is None:
        return None
    match = _MEASURE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _BYTES:
        raise InvalidRequest(f"{text!r} is not a number of bytes", hint="use for example 500GB, 2TB or 2TiB")
    return int(float(match[1]) * _BYTES[match[2].upper()])


def _rules(policy: RetentionPolicy) -> Iterator[str]:
    """Each rule of a policy, a list as its options have it."""
    for name, value in policy:
        if name == "best":
            yield from (f"best {one.metric}:{one.count}" + ":max" * (one.mode == "max") for one in policy.best)
        elif name == "steps":
            yield from (f"step {step}" for step in policy.steps)
        elif value is not None:
            yield f"{name} {value}"


def parse_best(text: str) -> Best:
    """loss:3 -> the three lowest, accuracy:2:max -> the two highest; a metric's name may have colons itself."""
    from holdfast_formats.rest.retention import Best

    match = re.fullmatch(r"(.+?):(\d+)(?::(min|max))?", text)
    try:
        if match is None:
            raise ValueError
        return Best(metric=match[1], count=int(match[2]), mode="max" if match[3] == "max" else "min")
    except ValueError as error:  # also what pydantic raises
        raise InvalidRequest(
            f"{text!r} is not METRIC:N or METRIC:N:max", hint="use for example loss:3 or accuracy:2:max"
        ) from error
