"""The tensors of a checkpoint while a program's statements run over them, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs import arrangement
from holdfast_formats.programs.arrangement import Arrangement
from holdfast_formats.programs.matching import STEPS_MAX, Surroundings, steps
from holdfast_formats.programs.names import NameIndex
from holdfast_formats.programs.operations import Ranks, Step, operate
from holdfast_formats.programs.statements import ProgramStatement
from holdfast_formats.region import Shape
from holdfast_formats.tensors import TensorSpec

SHOWN_MAX = 6  # names in an error


class Asserted(NamedTuple):
    """A statement's assumption about a stored tensor: its dtype, or that it is zero."""

    name: str
    dtype: str | None
    where: str


class Environment:
    """The current tensors by name. A statement removes the tensors on its left and adds those on its right."""

    def __init__(self, parameters: Mapping[str, Shape], sizes: Mapping[str, int], ranks: Ranks) -> None:
        self.held = {name: arrangement.of(TensorKey("model", name), shape) for name, shape in parameters.items()}
        self._index, self._sizes, self._ranks = NameIndex(parameters), sizes, ranks
        self._shapes: dict[str, Shape] = dict(parameters)
        self._spent: dict[str, Arrangement] = {}
        self._kept: set[str] = set()  # by `a -> a`: it stays, whatever uses it later
        self._untouched = set(parameters)
        self._steps = 0
        self.passing = False
        self.dropped: dict[str, str] = {}
        self.sliced: dict[str, str] = {}
        self.added: dict[str, str] = {}
        self.asserted: list[Asserted] = []
        self.copied: list[str] = []

    def run(self, statement: ProgramStatement, targets: Mapping[str, TensorSpec] | None) -> None:
        """Run one statement for every choice of its variables: first all are read, then all are made."""
        if statement.left[0].rest:
            self.passing = True
            return
        around = Surroundings(self._index, self._shapes, self._sizes, self._ranks)
        arrangements: list[tuple[str, Arrangement]] = []
        taken: dict[str, None] = {}
        for step in list(steps(statement, around)):
            self._steps += 1
            if self._steps > STEPS_MAX:
                raise LimitExceeded(
                    f"{statement.where}: more than {STEPS_MAX} steps",
                    hint="convert a part of the checkpoint at a time, or use names with fewer numbers",
                )
            arrangements += zip(step.outputs, self._results(step, targets), strict=True)
            taken.update(dict.fromkeys(step.inputs))
        identity = statement.plain and [name for name, _ in arrangements] == list(taken)
        self._take(taken, {name for name, _ in arrangements}, bool(arrangements), statement)
        self._put(arrangements, statement)
        if identity:
            self._kept |= taken.keys()

    def unnamed(self) -> list[str]:
        return sorted(self._untouched)

    def spent(self, name: str) -> Arrangement | None:
        """A tensor as it was before a statement used it."""
        return self._spent.get(name)

    def _results(self, step: Step, targets: Mapping[str, TensorSpec] | None) -> Sequence[Arrangement]:
        program_statement = step.statement
        if program_statement.left[0].nothing:
            return [self._new(step, name, targets) for name in step.outputs]
        inputs = [self._read(name) for name in step.inputs]
        self._note(step, inputs)
        return [] if not step.outputs else operate(step, inputs)

    def _new(self, step: Step, name: str, targets: Mapping[str, TensorSpec] | None) -> Arrangement:
        shape = step.listed("shape")
        if shape is None:
            shape = targets[name].shape if targets and name in targets else None
        if shape is None:
            raise InvalidRequest(f"{step.where}: shape= is missing", hint='_ -> name, shape=[…], dtype="float32"')
        self.added[name] = step.where
        wanted = targets[name].dtype if targets and name in targets else None
        return arrangement.zeros(shape, step.dtype("dtype") or step.dtype("dst_dtype") or wanted)

    def _read(self, name: str) -> Arrangement:
        held = self.held.get(name)
        if held is None:
            self.copied.append(name)
            return self._spent[name]
        return held

    def _note(self, step: Step, inputs: Sequence[Arrangement]) -> None:
        """Record a step's losses and assumptions."""
        program_statement = step.statement
        if step.outputs and program_statement.slices is None and "src_dtype" not in program_statement.texts:
            return
        if program_statement.slices is not None:
            self.sliced.update((source, step.where) for one in inputs for source in one.sources)
        dtype = step.dtype("src_dtype")
        zeros = not step.outputs and "zeros" in program_statement.words
        if dtype is not None:
            self.asserted += (Asserted(source, dtype, step.where) for one in inputs for source in one.sources)
        if zeros:
            self.asserted += (Asserted(source, None, step.where) for one in inputs for source in one.sources)
        if not step.outputs:
            self.dropped.update((source, step.where) for one in inputs for source in one.sources)

    def _take(self, taken: Mapping[str, None], targets: set[str], becoming: bool, statement: ProgramStatement) -> None:
        for name in taken:
            self._untouched.discard(name)
            if name not in self.held:
                continue
            if becoming and name in self._kept and name not in targets:
                self.copied.append(name)
                continue
            self._kept.discard(name)
            self._spent[name] = self.held.pop(name)
            self._index.remove(name)

    def _put(self, arrangements: Sequence[tuple[str, Arrangement]], statement: ProgramStatement) -> None:
        for name, one in arrangements:
            if name in self.held:
                raise StateMismatch(
                    f"{statement.where}: {name!r} already exists",
                    hint="each name is made once; use up the checkpoint's tensor before reusing its name",
                    tensor=name,
                )
            self.held[name] = one
            self._shapes[name] = one.shape
            self._index.add(name)
