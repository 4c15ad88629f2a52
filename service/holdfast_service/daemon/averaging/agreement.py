"""Whether updates of an average count for ranks of all nodes. On one machine there are no others: `OneNodeAgreement`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast_formats.staging.joint import AverageVote
from holdfast_service.daemon.averaging.rank_set import RankSetKey


class UpdateAgreement(Protocol):
    """Thread-safe."""

    @property
    def alone(self) -> bool:
        """Whether all ranks of a world come to this node."""

    @property
    def away(self) -> bool:
        """Whether other nodes cannot be asked now."""

    def counts(self, key: RankSetKey, vote: AverageVote) -> bool | None:
        """Whether the update of this node's vote counts; None while that is open."""

    def forget(self, key: RankSetKey) -> None:
        """These ranks' averages are gone from here."""

    def close(self) -> None: ...


class OneNodeAgreement:
    """Updates count once all ranks of the world are here."""

    alone, away = True, False

    def __init__(self, changed: Callable[[RankSetKey], None]) -> None: ...

    def counts(self, key: RankSetKey, vote: AverageVote) -> bool | None:
        return None

    def forget(self, key: RankSetKey) -> None: ...

    def close(self) -> None: ...
