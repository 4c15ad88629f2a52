"""What a wing gives to the core. The core imports no wing: it finds the packages below `holdfast_service.wings`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from holdfast_formats.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.responses import Response

    from holdfast_formats.rest.jobs import ConvertArguments
    from holdfast_service.api.metrics import Samples
    from holdfast_service.api.services import Services
    from holdfast_service.config import Config
    from holdfast_service.control.control import Control
    from holdfast_service.control.jobs.runner import JobKind
    from holdfast_service.daemon.copying.progress import Progress
    from holdfast_service.daemon.job_workers import Workers

PACKAGE = "holdfast_service.wings"
NAMES = frozenset({"cluster", "console", "convert", "merge", "notify"})  # of all wings


class RunningWing(Protocol):
    """The parts of a wing that run in a daemon; its routes find them in `app.state.wings`, by the wing's name."""

    def samples(self) -> Samples:
        """Its metrics, all of which `observe.metrics` declares."""
        ...


class RootWork(NamedTuple):
    """A root on which a job is done for this process's own user, with any directory; relative paths are below `here`."""

    control: Control
    here: Path
    trains: Callable[[str], bool] = lambda run: False  # whether ranks of a run are connected


class OwnJob(NamedTuple):
    """A kind of job that this process's own user has done on a root, by a command alone or by the daemon that serves it, and
    the word for it in the audit log.
    """

    run: Callable[[RootWork, Any, Progress], dict[str, Any]]
    done: str
    foretell: Callable[[Path, Any], dict[str, Any]] | None = None  # a dry run that opens no root


class OfflineParts(NamedTuple):
    """What a wing does for a command alone: kinds of jobs, and conversions from directory to directory."""

    jobs: Mapping[str, OwnJob]
    convert: Callable[[ConvertArguments, Progress], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Wing:
    """Every wing's package has one, as its `WING`. A part that a wing does not have is left out."""

    name: str
    routes: str = ""  # a package: every module of it has a router
    start: Callable[[Config, Services, ExitStack], RunningWing] | None = None  # runs until the stack unwinds
    problem_page: Callable[[Request, CheckpointError], Response] | None = None  # for browsers, where no route is
    jobs: Callable[[Workers], Mapping[str, JobKind]] = lambda workers: {}  # by kind
    offline: Callable[[], OfflineParts] = lambda: OfflineParts({})


@lru_cache(1)
def installed() -> tuple[Wing, ...]:
    """The wings of this installation, by name."""
    return tuple(import_module(f"{PACKAGE}.{name}").WING for name in _packages())


def absent() -> list[str]:
    """The names of wings that this installation lacks."""
    return sorted(NAMES - set(_packages()))


def _packages() -> list[str]:
    return [] if find_spec(PACKAGE) is None else [one.name for one in iter_modules(import_module(PACKAGE).__path__)]


def required(name: str, wanted: str) -> Wing:
    """This wing alone, without importing the others. Raises as `require`."""
    require(name, wanted)
    wing: Wing = import_module(f"{PACKAGE}.{name}").WING
    return wing


def require(name: str, wanted: str) -> None:
    """`InvalidRequest` if this installation lacks the wing that does what is `wanted`."""
    if name in absent():
        raise InvalidRequest(
            f"{wanted} needs the wing {name!r}, which this installation lacks",
            hint="install the whole package, or leave it out",
        )
