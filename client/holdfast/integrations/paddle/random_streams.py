"""Paddle's random streams as an entry of a state: of the CPU, of each GPU, and those that fleet's tracker has by name."""

from __future__ import annotations

import sys
from typing import Any

from holdfast.state.streams import FurtherStreams
from holdfast_formats.errors import StateMismatch

_CPU, _GPU, TRACKED = "cpu", "gpu.", "tracked"
_HINT = "keep the live random states: restore(exclude=('extra/rng',))"
_TRACKER = "paddle.distributed.fleet.layers.mpu.random"


class PaddleStreams(FurtherStreams):
    """The generators of this process."""

    name = "paddle"

    def state_dict(self) -> dict[str, Any]:
        tracked = {name: list(map(_text, states)) for name, states in self._tracked().items()}
        return {**{name: _text(one.get_state()) for name, one in _generators().items()}, TRACKED: tracked}

    def refuse_unfit(self, stored: Any) -> None:
        """Raise `StateMismatch` for named streams that one side lacks, and for states of another form."""
        if not isinstance(stored, dict) or not isinstance(stored.get(TRACKED), dict):
            raise StateMismatch("the checkpoint's states of Paddle's generators are something else", hint=_HINT)
        differing = sorted(stored[TRACKED].keys() ^ self._tracked().keys())
        if differing:
            raise StateMismatch(
                f"only the checkpoint, or only this process, has the random stream {differing[0]!r} of fleet's tracker",
                hint=f"seed the tracker before restore(), as the program that saved did, or {_HINT}",
            )

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        for name, generator in _generators().items():
            if name in stored:
                generator.set_state(_state(stored[name]))
        if stored[TRACKED]:
            tracker = sys.modules[_TRACKER].get_rng_state_tracker()
            tracker.set_states_tracker({name: list(map(_state, states)) for name, states in stored[TRACKED].items()})

    def absent(self, stored: dict[str, Any]) -> list[str]:
        return [f"{self.name} {name}" for name in stored if name not in (TRACKED, *_generators())]

    def mixed(self, stored: Any, seed: int) -> Any:
        """Those of the devices are seeded. The named ones stay: which ranks have the same is fleet's choice."""
        made = {}
        for name, generator in _generators().items():
            before = generator.get_state()
            generator.manual_seed(seed)
            made[name] = _text(generator.get_state())
            generator.set_state(before)
        return {**stored, **made}

    def _tracked(self) -> dict[str, Any]:
        """The named streams of fleet's tracker. Nothing has seeded it before its module is imported."""
        module = sys.modules.get(_TRACKER)
        return {} if module is None else dict(module.get_rng_state_tracker().get_states_tracker())


def _generators() -> dict[str, Any]:
    import paddle
    from paddle.base import core

    count = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    gpus = {f"{_GPU}{number}": core.default_cuda_generator(number) for number in range(count)}
    return {_CPU: core.default_cpu_generator(), **gpus}


def _text(state: Any) -> list[Any]:
    """Device, seed, offset and the text of the engine."""
    device, seed, offset, engine = state.__getstate__()
    return [device, seed, offset, bytes(engine).decode("ascii")]


def _state(text: list[Any]) -> Any:
    from paddle.base import core

    device, seed, offset, engine = text
    state = core.GeneratorState.__new__(core.GeneratorState)
    state.__setstate__((device, seed, offset, list(engine.encode("ascii"))))
    return state
