"""`holdfast ls`: list runs, or the checkpoints of one run."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, NamedTuple

import typer

from holdfast.read.checkpoint_index import CheckpointIndex, RunListing, ServiceIndex, open_library
from holdfast.rest import filters
from holdfast.rest.filters import NO_FILTER, Filter
from holdfast.terminal import completion, console, run_lists
from holdfast.terminal.options import AsJson, Root, Since, Url
from holdfast_formats.errors import InvalidRequest, NoSuchResource
from holdfast_formats.rest.columns import RUN_SORTS

Label = Annotated[str | None, typer.Option("--label", metavar="LABEL", help="Only checkpoints with this label.")]
State = Annotated[
    str | None,
    typer.Option(
        "--state",
        metavar="STATE",
        help="Only checkpoints in this state: committed, verified, unhealthy, abandoned or damaged.",
    ),
]
Healthy = Annotated[
    bool, typer.Option("--healthy", help="Only checkpoints without new NaN or infinities, as the service found.")
]

Sort = Annotated[
    str,
    typer.Option(
        "--sort",
        metavar="COLUMN",
        help=f"Sort runs by {', '.join(RUN_SORTS)}, metric:NAME, each with a minus for the largest first, or by attention.",
    ),
]
Tag = Annotated[
    list[str] | None,
    typer.Option(
        "--tag",
        metavar="TAG",
        help="Only runs with this tag; repeat it for runs with all of them.",
        autocompletion=completion.tags,
    ),
]
MISSING_SHOWN = 10  # steps
_HIDDEN = ("archived", "failed")
All = Annotated[bool, typer.Option("--all", help="List archived runs, and those that failed to start too.")]


class RunChoice(NamedTuple):
    """Which runs are listed, and in which order."""

    everything: bool
    sort: str
    tags: tuple[str, ...]


def ls(  # noqa: PLR0913 — one an option
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="List this run's checkpoints.", autocompletion=completion.runs)
    ] = None,
    label: Label = None,
    state: State = None,
    since: Since = None,
    root: Root = None,
    url: Url = None,
    healthy: Healthy = False,
    everything: All = False,
    sort: Sort = "name",
    tag: Tag = None,
    as_json: AsJson = False,
) -> None:
    """List runs, or the checkpoints of one run, newest first."""
    with console.reporting(as_json):
        wanted = Filter(label=label, state=state, since=filters.since(since))
        if run is None and (healthy or wanted != NO_FILTER):
            raise InvalidRequest("--label, --state, --since and --healthy need a run", hint="pass the run's name")
        if run is not None and (sort != "name" or tag):
            option = "--tag chooses" if tag else "--sort sorts"
            raise InvalidRequest(f"{option} runs, not the checkpoints of one", hint="leave out the run's name")
        with closing(open_library(root, url)) as library:
            if run is None:
                _list_runs(library, RunChoice(everything, sort, tuple(tag or ())), as_json)
            else:
                _list_checkpoints(library, run, wanted, healthy, as_json)


def _list_runs(library: CheckpointIndex, wanted: RunChoice, as_json: bool) -> None:
    from holdfast_formats.rest import lists

    summaries = run_lists.runs(library, wanted.sort, wanted.tags)
    runs = [run for run in summaries if wanted.everything or run.life not in _HIDDEN]
    extra = None if as_json else run_lists.extra(library, wanted.sort)
    columns = lists.runs(isinstance(library, ServiceIndex), extra, any(run.tags for run in runs))
    console.listed(columns, runs, f"No{' such' if wanted.tags else ''} runs in {library.label}.", as_json)
    if not as_json and (left := len(summaries) - len(runs)):
        console.warn(f"{left} archived or failed {'run is' if left == 1 else 'runs are'} not shown: `holdfast ls --all`")


def _list_checkpoints(library: CheckpointIndex, run: str, wanted: Filter, healthy: bool, as_json: bool) -> None:
    from holdfast_formats.rest import lists

    listing = library.checkpoints(run, wanted)
    if healthy:
        listing = RunListing([c for c in listing.checkpoints if c.healthy], listing.unreadable)
    if as_json:
        console.print_json([{**checkpoint.model_dump(), "state": checkpoint.state} for checkpoint in listing.checkpoints])
    else:
        such = "" if wanted == NO_FILTER and not healthy else " such"
        nothing = f"No{such} checkpoints of {run} in {library.label}."
        console.listed(lists.checkpoints(isinstance(library, ServiceIndex)), listing.checkpoints, nothing, False)
    for checkpoint in listing.checkpoints:
        if checkpoint.damage is not None:
            console.warn(f"step {checkpoint.step} is damaged: {checkpoint.damage.get('detail', 'unknown')}")
    for step in _missing(library, run):
        console.warn(f"step {step} is gone: something other than Holdfast removed it (`holdfast repair {run}@{step}`)")
    for error in listing.unreadable:
        console.warn(f"unreadable: {error.detail}")


def _missing(library: CheckpointIndex, run: str) -> list[int]:
    """Steps known only to the service, whose directories are missing."""
    if not isinstance(library, ServiceIndex):
        return []
    from holdfast.rest import runs  # with httpx, which the listing of a directory does without

    try:
        return runs.about(library.api, run).missing[:MISSING_SHOWN]
    except NoSuchResource:  # an older service
        return []
