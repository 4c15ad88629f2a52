"""Input of a run's summary: rows of the catalog and numbers of the storage, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from holdfast_formats.rest.measurements import Life
from holdfast_service.control.catalog.run_settings import RunSettings
from holdfast_service.control.insight.copy_lags import CopyLag

NOTHING: Mapping[str, float] = {}


class Save(NamedTuple):
    """A round. Times are seconds since the epoch, infinite where the recorded text is invalid."""

    step: int
    attempt: int
    state: str
    opened: float
    ended: float | None = None
    code: str | None = None
    measured: Mapping[str, float] = NOTHING


class NonFiniteSince(NamedTuple):
    """Where NaN or infinite values began. Of the tensor, None where its event is gone."""

    step: int
    group: str | None = None
    tensor: str | None = None
    nan: int | None = None
    inf: int | None = None
    tensors: int | None = None


class CheckpointFacts(NamedTuple):
    """Totals of a run's checkpoints, and the newest one of them."""

    checkpoints: int = 0
    bytes: int = 0
    newest: int | None = None
    newest_verified: int | None = None
    newest_healthy: int | None = None
    damaged: int = 0
    newest_damaged: int | None = None
    newest_bytes: int = 0
    created: str | None = None
    healthy: bool | None = None
    same_as: int | None = None
    nonfinite: int | None = None
    verified_created: str | None = None  # of the newest verified one
    unhealthy: int | None = None  # the newest one with known health, if it is unhealthy
    healthy_created: str | None = None  # of the newest healthy one,
    healthy_verified: bool = False  # and whether that is verified,
    healthy_copies: tuple[str, ...] = ()  # and the tiers in which it is too
    metrics: Mapping[str, float] = NOTHING  # of the newest one
    newest_sound: int | None = None  # not known to be damaged, and not abandoned
    nonfinite_since: NonFiniteSince | None = None  # while the newest one with known health is unhealthy


class ReplicaCounts(NamedTuple):
    """A run's replicas in one tier."""

    newest: int | None
    damaged: int
    failing: int = 0  # checkpoints of which no copy could be made so far,
    problem: str | None = None  # and why, of one of them
    lag: CopyLag | None = None  # None: unknown


NO_COPIES = ReplicaCounts(None, 0)


class Warned(NamedTuple):
    """A warning about a run's checkpoints since the newest one was verified, from its event."""

    kind: str
    text: str
    step: int | None
    at: str


class RunActivity(NamedTuple):
    """The state of a run's ranks, and since when they are gone."""

    life: Life | None = None
    since: str | None = None


UNKNOWN = RunActivity()


class Facts(NamedTuple):
    """One run at one moment. `saves` and `declared` (times of attempts) are the newest ones, newest first."""

    run: str
    attempt: int
    now: float
    held: CheckpointFacts = CheckpointFacts()
    saves: tuple[Save, ...] = ()
    declared: tuple[float, ...] = ()
    copies: Mapping[str, ReplicaCounts] = {}
    free_bytes: int | None = 0  # None: the storage states no limit
    quota_bytes: int | None = None
    makes_room: bool = False  # its policy lets old checkpoints go
    life: Life | None = None  # of its ranks, None where nothing is known of them
    since: str | None = None  # when it finished or died
    settings: RunSettings = RunSettings()
    warned: tuple[Warned, ...] = ()
    keep_last: int | None = None  # what retention keeps
