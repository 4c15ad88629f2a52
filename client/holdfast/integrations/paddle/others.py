"""Notes what trains parameters of a state and is not in it: an optimizer of Paddle, such as one that was constructed again,
and a gradient scaler.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

from holdfast.integrations.paddle.fleet.places import ParameterPlace
from holdfast.integrations.paddle.fleet.wrappers import innermost
from holdfast.state.untracked.other_optimizers import may_hold_one
from holdfast.state.untracked.scalers import caller, left_out

_states: weakref.WeakSet[Others] = weakref.WeakSet()  # all that note steps


class Others:
    """Every optimizer of Paddle that has taken a step since the state was given, and every scaler by which one of the state
    has, as long as they live.

    `given` are the objects in the state, and `places` is as for `PaddleOptimizer`.
    """

    def __init__(self, given: Mapping[str, Any], places: Callable[[], Mapping[str, ParameterPlace]]) -> None:
        from paddle.amp import AmpScaler
        from paddle.optimizer.lr import LRScheduler

        self._places = places
        self._own = {id(innermost(one)) for one in given.values()}
        self._scalers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        rest = (one for one in given.values() if not isinstance(one, AmpScaler | LRScheduler))
        self._hidden = any(map(may_hold_one, rest))
        self.stepped: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        _hear()
        _states.add(self)

    def own_stepped(self, optimizer: Any) -> None:
        """Note the scaler that takes this step of an optimizer of the state."""
        from paddle.amp import AmpScaler, GradScaler

        scaler = caller({AmpScaler.minimize.__code__, GradScaler.step.__code__})
        if scaler is not None and scaler.is_enable():
            self._scalers[scaler] = type(optimizer).__name__

    def left_out(self) -> list[str]:
        """A sentence on each optimizer that keeps something of a parameter of the state, and on a scaler, that would be
        lost.
        """
        others = [other for name, other in list(self.stepped.items()) if name not in self._own]
        scaled = [kind for scaler, kind in list(self._scalers.items()) if id(scaler) not in self._own]
        if self._hidden or not (others or scaled):
            return []
        named = [(other, self._kept(other)) for other in others]
        texts = [_sentence(type(other).__name__, kept) for other, kept in named if kept]
        pass_it = "pass it too, state(…, scaler=scaler) or attach(…, scaler=scaler)"
        return [*texts, *(f"{left_out(kind)}: {pass_it}" for kind in scaled[:1])]

    def _kept(self, optimizer: Any) -> list[str]:
        """The stored names of the parameters of which an optimizer keeps something, in order."""
        masters, places = dict(optimizer._master_weights), self._places()
        own_names = {master.name: name for name, master in masters.items()}
        owners = {owner for by_owner in list(optimizer._accumulators.values()) for owner in list(by_owner)} | masters.keys()
        return sorted({places[name].name for name in (own_names.get(owner, owner) for owner in owners) if name in places})


def _sentence(kind: str, kept: list[str]) -> str:
    rest = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
    return (
        f"not saved: what the {kind} that steps {kept[0]}{rest} keeps, because it is not in the state: pass it too, "
        "state(…, second=other) or attach(…, more={'second': other}); after an optimizer is constructed again, attach again"
    )


@cache
def _hear() -> None:
    """Note the steps of all optimizers from now on, in the method in which each ends. Paddle has no hook for that."""
    from paddle.optimizer import Optimizer

    own = Optimizer._apply_optimize

    @wraps(own)
    def heard(optimizer: Any, *given: Any, **named: Any) -> Any:
        done = own(optimizer, *given, **named)
        for state in list(_states):
            state.stepped[id(optimizer)] = optimizer
        return done

    Optimizer._apply_optimize = heard
