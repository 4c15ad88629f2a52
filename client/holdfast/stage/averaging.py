"""The moving average that the daemon keeps of a group: its updates are staged here, every so many optimizer steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from typing import Any, get_args

from holdfast.left_out import LeftOutNote
from holdfast.read.memory_load import fill
from holdfast.read.overwrite_guard import Overwriting
from holdfast.read.reader import CheckpointReader
from holdfast.stage import average_layout, background_safe, cuda_copy, slot_growth
from holdfast.stage.average_layout import AverageLayout
from holdfast.stage.average_memory import TABLE_ENTRY_BYTES, TABLE_ROOM, Ask, AverageMemory, AveragingRank, MappedAverage
from holdfast.stage.background_copy import BackgroundCopy
from holdfast.stage.copy_plans import CopyPlans
from holdfast.stage.replica_claims import buffers_of
from holdfast.stage.save_task import SaveTask
from holdfast.stage.staging import AveragePart
from holdfast.state.named_entries import NamedSnapshot
from holdfast.state.optimizer_wrappers import innermost
from holdfast.state.train_state import EXTRA, MASTER, GroupLeaves
from holdfast.threads.latch import Latch
from holdfast_formats.disk import state_json
from holdfast_formats.errors import CheckpointError, DaemonGone, DeadlineExceeded, InvalidRequest, StateMismatch
from holdfast_formats.staging import average
from holdfast_formats.staging.arena import PAGE_BYTES, page_aligned
from holdfast_formats.staging.average import (
    GROUP,
    VALUE,
    AverageHandover,
    AverageRule,
    AverageState,
    AverageUpdate,
    Correction,
)

log = logging.getLogger(__name__)

FREE_WAIT_S = 120.0  # how long a restore waits until the daemon has folded the last update
TAKEN_IN_S = 20.0  # how long a restore waits until the daemon has taken in what was restored
NAMED_MAX = 5


@dataclass(frozen=True)
class Ema:
    """A moving average of a group, which the daemon computes and saves as the group `ema`.

    After every `every`-th optimizer step the group is staged, and the daemon adds it to the average: c ← c + w·(x − c),
    with w = (1 − decay) / (1 − decayⁿ), or with `correction="none"` w = 1 − decay and c₁ = x₁, as
    `torch.optim.swa_utils` does.

    Attributes:
        decay: The share of the average that an update keeps, between 0 and 1.
        of: The group that is averaged.
        every: Optimizer steps from one update to the next.
        correction: `"bias"`, or `"none"`.
        loss_above: Leave out steps with a larger loss; call `checkpointer.ema.update(loss=…)` after each step then.

    Example:
        >>> Checkpointer("llama3-8b", state, ema=Ema(decay=0.999, of="model", every=10))
    """

    decay: float = 0.9999
    of: str = MASTER
    every: int = 10
    correction: Correction = "bias"
    loss_above: float | None = None

    def check(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, float | int) or not 0 <= self.decay < 1:
            raise InvalidRequest(f"Ema(decay={self.decay!r}): it must be a number from 0 on, below 1")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise InvalidRequest(f"Ema(every={self.every!r}): it must be a number of steps, at least 1")
        if self.correction not in get_args(Correction):
            raise InvalidRequest(f"Ema(correction={self.correction!r}): it must be one of {', '.join(get_args(Correction))}")
        limit: object = self.loss_above
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, float | int) or math.isnan(limit)):
            raise InvalidRequest(
                f"Ema(loss_above={limit!r}): it must be a number",
                hint="with math.inf, only steps whose loss is not a finite number are left out",
            )
        if not isinstance(self.of, str) or self.of in (GROUP, "extra", "optim"):
            raise InvalidRequest(f"Ema(of={self.of!r}): it must be the group of weights or of masters")

    @property
    def rule(self) -> AverageRule:
        return AverageRule(self.of, float(self.decay), self.every, self.correction)


class Averaging:
    """Updates of one rank's average. `update` and the properties are public; the rest is for the Checkpointer.

    Updates and saves are reported to the daemon in the order in which they began.
    """

    def __init__(self, ema: Ema, rank: AveragingRank, ask: Ask, automatic: Callable[[], bool]) -> None:
        """`automatic` returns whether the state has optimizers whose steps can be counted."""
        if not isinstance(ema, Ema):
            raise InvalidRequest(f"ema={ema!r} is not an Ema", hint="pass ema=holdfast.Ema(decay=0.999)")
        ema.check()
        self._ema, self._of, self._automatic = ema, rank, automatic
        self._memory = AverageMemory(rank, ema.rule, ask)
        self._layout: AverageLayout | None = None
        self._plans = CopyPlans()
        self._copy: BackgroundCopy | None = None
        self._devices: list[cuda_copy.DeviceCopy] = []
        self._number = self._skipped = self._lost = 0
        self._step = 0
        self._stepped: set[int] = set()
        self._begun = False
        self.refuse_own()
        self._refuse_none()

    @property
    def n(self) -> int:
        """Number of updates in the average."""
        return 0 if self._memory.mapped is None else average.read_record(self._memory.mapped.words).n

    @property
    def step(self) -> int:
        """Step of the last update in the average, counted in optimizer steps from the restored one."""
        return 0 if self._memory.mapped is None else average.read_record(self._memory.mapped.words).step

    @property
    def ready(self) -> bool:
        """Whether an update would be accepted now: the last one has been folded. An earlier one is dropped."""
        return self._memory.mapped is None or self._memory.mapped.free

    def update(self, *, loss: float | None = None) -> None:
        """Record a step with this loss: for `Ema(loss_above=…)`, and for states without optimizers.

        Raises `InvalidRequest` if the steps of the state's optimizers are counted.
        """
        limit = self._ema.loss_above
        if limit is None and self._automatic():
            raise InvalidRequest(
                "ema.update(): the steps of the state's optimizers are counted already",
                hint="leave the call out, or give Ema(loss_above=…)",
            )
        if limit is not None and loss is None:
            raise InvalidRequest("ema.update() needs loss= for Ema(loss_above=…)", hint="ema.update(loss=loss.item())")
        self._count(limit is not None and loss is not None and not (math.isfinite(loss) and loss <= limit))

    def optimizer_stepped(self, optimizer: Any, optimizers: list[Any]) -> None:
        """Count a step once every optimizer of the state has stepped."""
        if self._ema.loss_above is not None:
            return
        self._stepped.add(id(optimizer))
        if self._stepped >= {id(one) for one in optimizers}:
            self._stepped.clear()
            self._count(skip=False)

    def refuse_own(self) -> None:
        """`InvalidRequest` if the state has a group `ema` of its own, or comes from an adapter, whose tensors are not
        visible.
        """
        if any(isinstance(value, NamedSnapshot) for value in self._of.state.state.values()):
            raise InvalidRequest(
                "ema= cannot be used with a state that an adapter provides",
                hint="use the framework's own average, if it has one",
            )
        if GROUP in self._of.state.groups():
            raise InvalidRequest(
                "the state has an entry for the group 'ema', which ema= saves as well",
                hint="take the entry out of the state, or leave ema= out",
            )

    def _refuse_none(self) -> None:
        """`InvalidRequest` if the state has no such group, and none can come with the first step, as masters may."""
        of = self._of.state
        optimizers = innermost(of.state)
        own = all(type(one).__module__.startswith("torch.optim.") for one in optimizers)  # they never make masters
        if optimizers and self._ema.of not in of.groups() and (own or self._ema.of != MASTER):
            raise self._lacking()

    def _held(self) -> GroupLeaves:
        """The tensors of the averaged group; `InvalidRequest` if there are none."""
        held = self._of.state.held(self._ema.of)
        if not held.leaves:
            raise self._lacking()
        return held

    def _lacking(self) -> InvalidRequest:
        groups = ", ".join(self._of.state.groups())
        return InvalidRequest(
            f"Ema(of={self._ema.of!r}): the state has no tensor in this group",
            hint="average the weights themselves: Ema(of='model')"
            if self._ema.of == MASTER
            else f"average another group of the state: {groups}",
        )

    def goes_on_from(self, step: int) -> None:
        """The state is that of this step."""
        self._step = step

    def fence(self) -> None:
        """Return when the last update no longer reads the live state."""
        if self._copy is not None:
            self._copy.fence()
            for copy in self._devices:
                copy.fence()

    def expected_bytes(self) -> int:
        """The room that a save will need for the average."""
        return sum(4 * count + PAGE_BYTES for count in self._counts()) + 2 * PAGE_BYTES

    def beside_bytes(self) -> int:
        """The memory that the daemon will need for the average itself."""
        counts = self._counts()
        return average.geometry(self.expected_bytes(), TABLE_ROOM * TABLE_ENTRY_BYTES * len(counts) + 4096).segment_bytes

    def _counts(self) -> list[int]:
        """How many elements each tensor of the average has."""
        state = self._of.state
        leaves = state.held(self._ema.of).leaves or state.held("model").leaves  # masters may come with the first step
        return [piece.tensor.numel() for leaf in leaves for piece in leaf.pieces]

    def part(self, data_bytes: int) -> AveragePart | None:
        """The group `ema` of a save whose slot has `data_bytes` without it; None if no update was staged yet."""
        if self._layout is None or self._memory.mapped is None:
            return None
        layout = self._layout
        place = page_aligned(data_bytes)
        average_handover = AverageHandover(
            place, layout.nbytes, self._number, layout.digest, self._skipped, self._lost, apart=layout.apart
        )
        return average_layout.in_slot(layout, data_bytes, average_handover)

    @property
    def decided(self) -> Latch:
        """Set once the daemon has been sent every update so far; a save seals after that."""
        return self._memory.decided

    def saving(self, task: SaveTask) -> None:
        """Send later updates only after this save has sealed."""
        self._memory.follow(task)

    def restored(self, reader: CheckpointReader) -> tuple[str, ...]:
        """Send this rank's part of a checkpoint's average to the daemon, or reset it; returns notes.

        Raises `StateMismatch` for an average of other tensors, and what a restore raises for damage.
        """
        text = state_json.for_rank(reader.state, self._of.rank).values.get(GROUP, {}).get(VALUE)
        self._step = reader.manifest.step
        self.fence()
        if text is None:
            if self._memory.mapped is not None:
                self._seed(AverageState(*_words(self._ema.rule), n=0, step=self._step), reader)
            return (
                LeftOutNote(
                    f"{reader.source.label} has no average from a daemon: the average starts again at the next update"
                ),
            )
        state = average.decode_state(text)
        self._seed(state, reader)
        mine = AverageState(*_words(self._ema.rule), n=state.n, step=state.step)
        changed = [
            f"{name} was {getattr(state, name)}, and is {getattr(mine, name)} now"
            for name in ("of", "decay", "every", "correction")
            if getattr(state, name) != getattr(mine, name)
        ]
        return (LeftOutNote(f"the average continues with other options: {'; '.join(changed)}"),) if changed else ()

    def taken_in(self) -> tuple[str, ...]:
        """Wait until the daemon has applied `restored`, on all ranks of all nodes; returns notes."""
        if self._memory.mapped is None or self._memory.until_free(self._memory.mapped, TAKEN_IN_S):
            return ()
        return ("the daemon has not loaded the restored average yet: updates are dropped until then",)

    def close(self) -> None:
        """Finish the last update. The daemon keeps the memory."""
        self.fence()
        with suppress(DeadlineExceeded):
            self._of.session.until(self.decided, FREE_WAIT_S)
        self._automatic = bool  # drops its reference to the optimizers
        self._memory.close()

    def _count(self, skip: bool) -> None:
        self._step += 1
        if not self._begun:  # the state is complete now
            self._held()
            self._begun = True
        if self._step % self._ema.every:
            return
        try:
            self._hand_over(skip)
        except (DaemonGone, DeadlineExceeded) as error:
            self._lost += 1
            log.warning("an update of the average at step %d is lost: %s", self._step, error.detail)

    def _hand_over(self, skip: bool) -> None:
        self._number += 1
        layout = self._present()
        memory = self._memory.ready(layout)
        number = self._number
        if skip or not memory.free:  # where the last one is not folded yet, this one is dropped
            self._skipped += skip
            self._memory.report(lambda: average.decide(memory.words, number))
        else:
            average.take(memory.words, number)
            update = AverageUpdate(self._of.owner, number, self._step, self._ema.rule, layout.digest, layout.stretches)
            self._stage(layout, memory, update)

    def _stage(self, layout: AverageLayout, memory: MappedAverage, update: AverageUpdate) -> None:
        plan = self._plans.onto(memory.mapped, memory.update, layout.copies)
        devices = [cuda_copy.DeviceCopy(lane) for lane in plan.lanes]
        for device in devices:
            device.begin()
        plan.copy_at_once()

        def end(error: CheckpointError | None) -> None:
            error = cuda_copy.finish(devices, error)
            if error is None:
                self._memory.report(lambda: _seal(memory, update), before)
            else:
                self._lost += 1
                log.warning("an update of the average at step %d is lost: %s", update.step, error.detail)
                self._memory.report(lambda: _give_back(memory.words, update.number), before)

        before = self._memory.turn()
        self._devices = devices
        self._copy = BackgroundCopy(plan.tracks, end, devices)
        self._copy.start()

    def _present(self) -> AverageLayout:
        """The group's layout now. `StateMismatch` if its tensors differ from those of the average."""
        of, held, known = self._of, self._held(), self._layout
        same = known is not None and len(known.leaves) == len(held.leaves)
        if known is not None and same and all(map(is_, known.leaves, held.leaves)):
            return known
        judge = background_safe.Judge(of.state.state, of.fenced)
        layout = average_layout.lay_out(held.leaves, held.aliases, buffers_of(of.state.state), judge, of.file_bytes_max)
        if known is not None and layout.digest != known.digest:
            change = slot_growth.compare(known.leaves, layout.leaves)
            raise StateMismatch(
                f"the group {self._ema.of!r} no longer has the tensors of the average ({change})",
                hint="start a new launch, whose restore() gives the daemon the average of the last checkpoint",
                added=list(change.added),
                removed=list(change.removed),
                changed=list(change.changed),
            )
        self._layout = layout
        return layout

    def _seed(self, state: AverageState, reader: CheckpointReader) -> None:
        """Send the daemon the average to continue from: the checkpoint's, or nothing if its n is 0."""
        layout = self._present()
        memory = self._memory.ready(layout)
        if not self._memory.until_free(memory, FREE_WAIT_S):
            raise DeadlineExceeded(
                "the daemon has not applied the last update of the average in time", hint="check the daemon's log"
            )
        self._number += 1
        self._skipped = self._lost = 0
        update = AverageUpdate(
            self._of.owner,
            self._number,
            state.step,
            self._ema.rule,
            layout.digest,
            layout.stretches if state.n else (),
            state,
        )
        average.take(memory.words, update.number)
        try:
            if state.n:
                self._read(layout, memory, reader)
        except BaseException:
            turn = update.number
            self._memory.report(lambda: _give_back(memory.words, turn))
            raise
        seeded = AverageUpdate(
            *(update.owner, update.number, update.step, update.rule, update.layout),
            tuple(_as_kept(one) for one in update.stretches),
            state,
        )
        self._memory.report(lambda: _seal(memory, seeded))

    def _read(self, layout: AverageLayout, memory: MappedAverage, reader: CheckpointReader) -> None:
        stored = reader.manifest.tensors.get(GROUP, {})
        wanted = {one.spec.name: (one.spec.dtype, tuple(one.spec.shape)) for one in layout.fragments}
        there = {name: (entry.dtype, tuple(entry.shape)) for name, entry in stored.items()}
        wrong = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
        if wrong:
            raise StateMismatch(
                f"the average in {reader.source.label} is not of the tensors of the group {self._ema.of!r}: "
                f"{', '.join(wrong[:NAMED_MAX])}{', …' if len(wrong) > NAMED_MAX else ''} differ or are missing",
                hint="average the same group as before, or restore without ema=",
                tensors=wrong,
            )
        of = self._of
        wants = average_layout.wants(layout, memory.update)
        fill(reader, wants, of.session.link, of.rank, Overwriting(lambda: None))


def _seal(memory: MappedAverage, update: AverageUpdate) -> None:
    average.seal(memory.words, memory.geometry, update.number, average.encode_update(update))


def _give_back(words: memoryview, number: int) -> None:
    average.free(words)
    average.decide(words, number)


def _as_kept(stretch: average.AverageStretch) -> average.AverageStretch:
    """A stretch that brings what the accumulator holds."""
    return stretch if stretch.dtype == "U8" else average.AverageStretch(stretch.offset, stretch.count, "F32")


def _words(rule: AverageRule) -> tuple[str, float, int, Correction]:
    return rule.of, rule.decay, rule.every, rule.correction


def of_save(groups: tuple[str, ...]) -> tuple[str, ...]:
    """The groups of a save with the average's among them: before `extra`, which is the last."""
    return (*(group for group in groups if group != EXTRA), GROUP, *(group for group in groups if group == EXTRA))
