"""Events between parts of the service: publishers and subscribers do not know each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Signal(Generic[P]):
    """One kind of event. Subscribers are called in the publisher's thread, in the order of their subscription; their errors
    reach the publisher.
    """

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[P, object], ...] = ()

    def subscribe(self, subscriber: Callable[P, object]) -> None:
        self._subscribers = (*self._subscribers, subscriber)

    @property
    def subscribed(self) -> bool:
        return bool(self._subscribers)

    def publish(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for subscriber in self._subscribers:
            subscriber(*args, **kwargs)
