"""Finds checkpoints for the command line: in a root, without a service, or through a service.

Readers and API clients are imported when needed: a listing starts in half the time without numpy, and in two thirds of it
without httpx.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from holdfast.config import DEFAULT_ROOT, default_url, given_url
from holdfast.read.checkpoint_root import CheckpointRoot, root_of
from holdfast.read.names import BEST, LATEST, LATEST_HEALTHY
from holdfast.rest.filters import NO_FILTER, Filter
from holdfast_files.objects import address
from holdfast_formats import naming
from holdfast_formats.errors import (
    CheckpointError,
    DaemonGone,
    InvalidRequest,
    NoSuchCheckpoint,
    NoSuchRun,
)
from holdfast_formats.near_names import did_you_mean

if TYPE_CHECKING:
    from holdfast.read.sources import Source
    from holdfast.rest.api import Api
    from holdfast_formats.rest import bodies

PROBE_TIMEOUT_S = 5.0  # without a listener the connection fails at once; a busy service takes its time
_BEST = re.compile(rf"{BEST}(?::(?P<metric>.+?)(?::(?P<mode>min|max))?)?")


class ByMetric(NamedTuple):
    """The best checkpoint by a metric; without a name, by the metric of the run's retention policy."""

    metric: str | None = None
    mode: Literal["min", "max"] = "min"


class CheckpointTarget(NamedTuple):
    """A parsed RUN@STEP, RUN@latest, RUN, directory path, or any but the last below the address of a `root`.

    `step` is None for the newest, the newest `healthy`, and the `best`.
    """

    run: str
    step: int | None
    directory: Path | None = None
    healthy: bool = False
    best: ByMetric | None = None
    root: CheckpointRoot | None = None


class RunListing(NamedTuple):
    """A run's checkpoints, newest first, and directories among them that cannot be read."""

    checkpoints: list[bodies.CheckpointInfo]
    unreadable: list[CheckpointError]


class CheckpointIndex(Protocol):
    """Interface: runs and their checkpoints."""

    @property
    def label(self) -> str: ...
    def runs(self) -> list[bodies.Run]: ...
    def checkpoints(self, run: str, wanted: Filter = NO_FILTER) -> RunListing: ...
    def source(self, run: str, step: int | None) -> Source: ...  # of the newest step for None
    def judged(self, target: CheckpointTarget) -> int: ...  # the step of a target that is `healthy` or the `best`
    def close(self) -> None: ...


class ServiceIndex:
    """Uses the service."""

    def __init__(self, api: Api) -> None:
        self.api = api

    @property
    def label(self) -> str:
        return self.api.url

    def runs(self) -> list[bodies.Run]:
        return list(self.api.runs())

    def checkpoints(self, run: str, wanted: Filter = NO_FILTER) -> RunListing:
        with self._suggesting(run):
            return RunListing(list(self.api.checkpoints(run, wanted)), [])

    def source(self, run: str, step: int | None) -> Source:
        from holdfast.read.sources import HttpSource

        with self._suggesting(run):
            return HttpSource(self.api, run, self.api.checkpoint(run, LATEST if step is None else step).step)

    def judged(self, target: CheckpointTarget) -> int:
        with self._suggesting(target.run):
            return step_of(self.api, target)

    def close(self) -> None:
        self.api.close()

    @contextmanager
    def _suggesting(self, run: str) -> Iterator[None]:
        """Add the nearest runs that this caller may see to an error about a run that does not exist."""
        try:
            yield
        except NoSuchRun as error:
            hint = error.hint
            with suppress(CheckpointError):  # of the list: this error is the one that counts
                hint = did_you_mean(run, (one.name for one in self.api.runs()), hint)
            raise NoSuchRun(error.detail, hint=hint, **error.members) from None


def parse_target(text: str) -> CheckpointTarget:
    """Parse RUN@STEP, RUN@latest, RUN@latest-healthy, RUN@best, RUN@best:METRIC, RUN@best:METRIC:max, RUN, a directory, or
    s3://BUCKET/PREFIX/ with one of the former.

    Raises `InvalidRequest` for anything else.
    """
    if address.is_address(text):
        return _below_address(text)
    path = Path(text)
    if "/" in text or text in (".", "..") or (path / naming.MANIFEST).is_file() or (path / naming.COMMIT).is_file():
        if not path.is_dir():
            raise NoSuchCheckpoint(f"the directory {text} does not exist", hint="pass RUN@STEP, or a checkpoint's directory")
        return CheckpointTarget("", None, path)
    run, at, step = text.partition("@")
    naming.check_run(run)
    if not at or step == LATEST:
        return CheckpointTarget(run, None)
    if step == LATEST_HEALTHY:
        return CheckpointTarget(run, None, healthy=True)
    if match := _BEST.fullmatch(step):
        return CheckpointTarget(run, None, best=ByMetric(match["metric"], "max" if match["mode"] == "max" else "min"))
    if not (step.isascii() and step.isdigit()):
        hint = "pass RUN@STEP, RUN@latest, RUN@latest-healthy, RUN@best:METRIC, RUN or a directory"
        raise InvalidRequest(f"{text!r} does not name a checkpoint", hint=hint)
    return CheckpointTarget(run, naming.check_step(int(step)))


def _below_address(text: str) -> CheckpointTarget:
    place, _, named = text.rpartition("/")
    root = root_of(place if place.count("/") > 1 else text)
    if "@" not in named:
        hint = "write s3://BUCKET/PREFIX/RUN@STEP or RUN@latest; `holdfast ls --root s3://BUCKET/PREFIX` lists the runs"
        raise InvalidRequest(f"{text} does not name a checkpoint", hint=hint)
    return parse_target(named)._replace(root=root)


def of_service(text: str) -> CheckpointTarget:
    """`parse_target` for what only a service can do; `InvalidRequest` for the place of a checkpoint."""
    target = parse_target(text)
    if target.directory is not None or target.root is not None:
        place = "a directory" if target.root is None else "in a bucket"
        raise InvalidRequest(f"{text} is {place}, and this needs a service", hint="pass RUN@STEP, and --url for its service")
    return target


def step_of(api: Api, target: CheckpointTarget) -> int:
    """The step of a target on a service; `NotFound` if there is none, `InvalidRequest` if a metric is missing."""
    if target.best is not None:
        metric, mode = target.best if target.best.metric is not None else _of_the_policy(api, target.run)
        return api.best(target.run, str(metric), mode).step
    named = target.step if target.step is not None else LATEST_HEALTHY if target.healthy else LATEST
    return api.checkpoint(target.run, named).step


def _of_the_policy(api: Api, run: str) -> ByMetric:
    from holdfast.rest import retention

    rules = {ByMetric(best.metric, best.mode) for best in retention.policy(api, run).policy.best}
    if len(rules) != 1:
        reason = (
            "its retention policy has no rule for the best metric"
            if not rules
            else f"its retention policy has rules for {len(rules)} metrics"
        )
        hint = f"name the metric, as in {run}@best:loss or {run}@best:accuracy:max; `holdfast ls {run}` shows metrics"
        raise InvalidRequest(f"best of {run} needs a metric: {reason}", hint=hint)
    return rules.pop()


def open_library(root: CheckpointRoot | None, url: str | None) -> CheckpointIndex:
    """The library for these options; without any, the service that answers, otherwise ./holdfast-data.

    Raises `DaemonGone` if there is neither. HOLDFAST_URL counts as `--url`.
    """
    if root is not None and url is not None:
        raise InvalidRequest("--root and --url cannot be combined", hint="pass only one of them")
    if root is not None:
        return _index(root)
    from holdfast.rest.api import Api

    if url is not None or given_url() is not None:
        return ServiceIndex(Api(url or default_url()))
    if answers(default_url()):
        return ServiceIndex(Api(default_url()))
    if DEFAULT_ROOT.is_dir():
        return _index(root_of(DEFAULT_ROOT))
    raise DaemonGone(
        f"no service answers at {default_url()}, and the directory ./{DEFAULT_ROOT} does not exist",
        hint="pass --root DIR or --url URL, or start a service with `holdfast serve`",
    )


def _index(root: CheckpointRoot) -> CheckpointIndex:
    from holdfast.read.root_index import RootIndex

    return RootIndex(root)


@contextmanager
def open_source(target: CheckpointTarget, root: CheckpointRoot | None, url: str | None) -> Iterator[Source]:
    """The files of the target's checkpoint, until the end of the context."""
    if target.directory is not None:
        from holdfast.read.sources import DirectorySource

        with DirectorySource(target.directory) as directory:
            yield directory
        return
    if target.root is not None:
        if root is not None or url is not None:
            raise InvalidRequest(
                "a checkpoint's address cannot be combined with --root or --url", hint="leave the option out"
            )
        root = target.root
    with closing(open_library(root, url)) as library:
        step = library.judged(target) if target.healthy or target.best is not None else target.step
        with closing(library.source(target.run, step)) as source:
            yield source


def answers(url: str) -> bool:
    """Whether a Holdfast service answers at this URL."""
    from holdfast.rest.api import Api

    try:
        with Api(url, PROBE_TIMEOUT_S) as api:
            api.health()
    except CheckpointError:
        return False
    return True
