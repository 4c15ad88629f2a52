"""Methods of a framework's objects that are replaced on one object."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any


class ReplacedMethod:
    """Replaces the method `own` of one object by `instead`.

    A copy of the object, also by pickle, has its own method again: `instead` saves and restores the original.
    """

    def __init__(self, own: Callable[..., Any], instead: Callable[..., Any]) -> None:
        self._own, self._instead = own, instead

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._instead(*given, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._own, memo)

    def __reduce__(self) -> Any:
        if isinstance(self._own, ReplacedMethod):
            return self._own.__reduce__()
        if inspect.ismethod(self._own):
            return getattr, (self._own.__self__, self._own.__name__)
        return copy.copy, (self._own,)
