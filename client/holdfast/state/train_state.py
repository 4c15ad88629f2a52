"""A training state as the trainer hands it over, seen as groups of named leaves and JSON values, and put back.

    key and value                                             group     names
    a module: under "model", or the only one                  model     the model's own
    another module under k                                    k         the model's own
    Named under k                                             k         what it says
    a mapping of tensors under "model" or "master"            the key   its keys
    "ema": a module or mapping of tensors; an AveragedModel   ema       the model's own
    torch optimizers, OptimizerShards                         optim     <parameter>/<state key>
    tensors and mappings of tensors under k                   extra     k, k/<name>
    with state_dict and load_state_dict                       extra     k and ranks/<rank>/k/…
    a torch.Generator, a tracker of random streams            extra     k and ranks/<rank>/k/…
    other plain values                                        extra     k
    Given                                                     its own   its own
    random streams, unasked; FurtherStreams                   extra     ranks/<rank>/rng/…

The groups follow the state's entries and exist without tensors too; `extra` always does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from holdfast.layout.declared import DeclaredLayout
from holdfast.layout.places import land
from holdfast.layout.rank_view import Live
from holdfast.left_out import LeftOutNote
from holdfast.read.overwrite_guard import OverwriteGuard
from holdfast.state import entries, extras, frozen, masters, optimizer_resume, optimizer_wrappers, rng, state_tensors
from holdfast.state.change_watch import ChangeWatch
from holdfast.state.containers import ContainerKeeper
from holdfast.state.entries import AskedEntry, StatePart
from holdfast.state.exclusion import Exclusion, is_extra_alone, keep_trained, trained
from holdfast.state.frozen import GradientNotes
from holdfast.state.hyper_parameters import FirstRates, check_keep, scheduler_settings
from holdfast.state.masters import BesideWeights, Masters, settle
from holdfast.state.modules import (
    EMA,
    MODEL,
    NamedTensors,
    refuse_empty_lists,
)
from holdfast.state.named import Named, modules_of
from holdfast.state.named_entries import NamedSnapshot
from holdfast.state.optimizer_entries import KnownOfOptimizers, OptimizerEntry, optimizers_of
from holdfast.state.optimizer_shards import OptimizerShards, ShardedOptimizer
from holdfast.state.partitioned.owners import RestoredForAll
from holdfast.state.rng import RandomState
from holdfast.state.state_tensors import OptimizerDocument
from holdfast.state.streams import FurtherStreams
from holdfast.state.temporaries import Temporaries
from holdfast.state.untracked import unsaved
from holdfast.state.untracked.load_hooks import LoadHooks
from holdfast.state.untracked.optimizer_numbers import SavedNumbers, WrapperNumbers
from holdfast.state.untracked.unsaved import Unsaved, UnsavedState
from holdfast.tensors import sharding_marks
from holdfast.tensors.device_meshes import KnownMesh, mesh_of
from holdfast.tensors.fragments import Storable, is_sharded
from holdfast.tensors.leaves import Content, Key, KnownLeaf, Leaf, OfferedLeaves, PartPlan, Selection, check_groups
from holdfast.tensors.matching import MatchedLeaves, match_leaves
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout import successors
from holdfast_formats.layout.mesh import Mesh

__all__ = ["Leaf", "MatchedLeaves", "OfferedLeaves", "Snapshot", "TrainState"]

MASTER, OPTIM, EXTRA = state_tensors.MASTER_GROUP, state_tensors.GROUP, extras.GROUP


class Snapshot(NamedTuple):
    """What this rank would save: leaves are views of live memory, everything else was copied for the snapshot.

    The first `steady` leaves will probably be the same at the next save. `notes` list what was left out.
    """

    groups: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    values: dict[str, dict[str, str]]
    aliases: dict[str, dict[str, str]]
    mesh: dict[str, int]
    steady: int
    notes: tuple[str, ...] = ()


class GroupLeaves(NamedTuple):
    """The leaves of one group, and its aliases."""

    leaves: tuple[Leaf, ...]
    aliases: Mapping[str, str]


class Parts(NamedTuple):
    """The state's entries by kind: named tensors, optimizers, and entries that are read again at every save."""

    groups: tuple[str, ...]
    named: tuple[NamedTensors, ...]
    optimizers: tuple[OptimizerEntry, ...]
    others: tuple[AskedEntry, ...]
    keeper: ContainerKeeper

    @property
    def all(self) -> tuple[StatePart, ...]:
        return (*self.named, *self.optimizers, *self.others)

    def beside_weights(self) -> BesideWeights:
        """The weights, and related state: full-precision copies and averages."""
        weights: dict[str, Storable] = {}
        for part in self.named:
            if part.group not in (MASTER, EMA, EXTRA):
                prefix = "" if part.group == MODEL else f"{part.group}."
                weights.update({prefix + name: value for name, value in part.state.tensors.items()})
        copies = {name: value for part in self.named if part.group == MASTER for name, value in part.state.tensors.items()}
        averages = [value for part in self.named if part.group == EMA for value in part.tensors()]
        return masters.beside(self.optimizers, weights, copies, averages)

    def tensors(self, of: Callable[[str], bool]) -> list[Storable]:
        """The named tensors and those of optimizers, of the entries with these keys."""
        named = (part.tensors() for part in self.named if of(part.path))
        return list(chain(*named, *(part.tensors() for part in self.optimizers if of(part.key))))

    def plans(self, stored: OfferedLeaves, selection: Selection) -> list[PartPlan]:
        """What each entry wants from the checkpoint."""
        named = [part.plan(stored, selection) for part in self.named]
        resumed = [optimizer_resume.plan(part, stored, selection, self.keeper) for part in self.optimizers]
        return [*named, *resumed, *(part.plan(stored, selection) for part in self.others)]


class SnapshotOf(NamedTuple):
    parts: Parts
    taken: Snapshot


class _Walk(NamedTuple):
    """A walk through the whole state, valid while `watch`, `gradients` and `entries` are unchanged."""

    parts: Parts
    content: Content  # of named tensors and optimizers
    documents: tuple[OptimizerDocument, ...]
    watch: ChangeWatch
    gradients: GradientNotes
    entries: Mapping[str, Any]


class TrainState:
    """The live training state of one rank. It refers to the caller's objects and holds no copy of them."""

    def __init__(
        self,
        state: Mapping[str, Any],
        rank: int,
        world: int,
        declared: DeclaredLayout | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """`mesh`: how the ranks are arranged, if that is known otherwise than from a declared layout."""
        if not isinstance(state, Mapping):
            raise InvalidRequest(
                f"the state must be a mapping of names to objects, not a {type(state).__name__}",
                hint="for example {'model': model, 'optimizer': optimizer}",
            )
        if not 0 <= rank < world:
            raise InvalidRequest(
                f"rank {rank} is not valid in a world of {world}", hint="number the ranks from 0 to world - 1"
            )
        self.state = state
        self.rank = rank
        self.world = world
        self.declared = declared
        self.mesh = mesh if mesh is not None or declared is None else declared.layout.mesh
        self.wholeness = OverwriteGuard()
        self.random = rng.Random([value for value in state.values() if isinstance(value, FurtherStreams)])
        self._known: dict[Key, KnownLeaf] = {}  # found by earlier snapshots, so that later ones need not look again
        self._walk: _Walk | None = None
        self.gradients = frozen.NO_GRADIENTS  # of the last snapshot
        self._temporaries = Temporaries()
        self._temporaries.refuse(state)
        self._numbers: dict[str, WrapperNumbers] = {}  # of optimizers, by key
        self._known_of_optimizers = KnownOfOptimizers(FirstRates(), RestoredForAll())
        self.unsaved = Unsaved(state)
        self._parts()  # refuses now what can be refused without a save
        self.unsaved.record()  # before training changes anything
        for key, numbers in self._numbers.items():
            numbers.look(state[key])

    def groups(self) -> tuple[str, ...]:
        """The groups that this state has now; an optimizer's first step may add `master`."""
        return self._parts().groups

    def mesh_of_tensors(self) -> KnownMesh:
        """How the ranks are arranged, as far as the device mesh of the state's DTensors tells."""
        modules = chain.from_iterable(map(modules_of, self.state.values()))
        fully_sharded = any(hasattr(inner, "_get_fsdp_state") for module in modules for inner in module.modules())
        values = (value for part in self._parts().named for value in part.state.tensors.values())
        return mesh_of(values, self.world, fully_sharded)

    def held(self, group: str) -> GroupLeaves:
        """The tensors of one group, which the optimizers may hold, in their present memory; the same leaves as at the last
        save.
        """
        walk = self._walk = self._walk if self._walk is not None and self._holds(self._walk) else self._walked()
        leaves = tuple(leaf for leaf in walk.content.leaves.values() if leaf.group == group)
        return GroupLeaves(leaves, walk.content.aliases.get(group, {}))

    def snapshot(self, groups: Collection[str] | None = None, exclude: Sequence[str] = ()) -> Snapshot:
        """The live state of these groups (all, if None); `Refused` with the path of anything that cannot be stored.

        Names excluded by `exclude` are in the notes. `InvalidRequest` for trained ones.
        """
        parts, whole = self._snapshot_of_all() if groups is None else self._part_of(groups)
        ignored = [name for part in parts.named if part.group in whole.groups for name in part.left_out()]
        if ignored:
            text = f"left out because the module lists them in _keys_to_ignore_on_save: {', '.join(ignored)}"
            whole = whole._replace(notes=(LeftOutNote(text),))
        if EXTRA in whole.groups:
            strangers = (*self.unsaved.others.notes(), *self.unsaved.scalers.notes())
            notes = (*entries.notes_of(self.state), *strangers, *unsaved.notes_of(self.unsaved.last))
            whole = whole._replace(notes=(*whole.notes, *notes))
        if self.declared is not None:
            whole = whole._replace(notes=(*whole.notes, *self.declared.check_now(whole.groups)))
        return self._without(whole, parts, exclude) if exclude else whole

    def _without(self, whole: Snapshot, parts: Parts, exclude: Sequence[str]) -> Snapshot:
        if any(isinstance(part, NamedSnapshot) for part in parts.others):
            raise InvalidRequest(
                "exclude= cannot be combined with a state that an adapter provides",
                hint="leave these values out of that state",
            )
        stepped = (name for optimizer in parts.optimizers for name in optimizer.parameter_names())
        exclusion = Exclusion(exclude, whole.leaves, whole.values, whole.aliases, trained(parts.named, stepped))
        if self.declared is not None and not is_extra_alone(exclusion):
            raise InvalidRequest(
                "with layout=, exclude= can leave out only entries of the group extra, because other names are "
                "those of whole tensors",
                hint="leave the tensors out of the state, or save other groups with groups=",
            )
        kept = [leaf for leaf in whole.leaves if leaf.key not in exclusion.leaves]
        steady = sum(leaf.key not in exclusion.leaves for leaf in whole.leaves[: whole.steady])
        values = {
            group: {key: text for key, text in held.items() if (group, key) not in exclusion.texts}
            for group, held in whole.values.items()
        }
        aliases = {
            group: {alias: name for alias, name in tied.items() if (group, name) not in exclusion.leaves}
            for group, tied in whole.aliases.items()
        }
        notes = (*whole.notes, *exclusion.notes())
        return whole._replace(leaves=tuple(kept), values=values, aliases=aliases, steady=steady, notes=notes)

    def _snapshot_of_all(self) -> SnapshotOf:
        walk = self._walk = self._walk if self._walk is not None and self._holds(self._walk) else self._walked()
        content = Content(known=self._known, taken=walk.content.leaves)
        for document in walk.documents:
            document.collect(content)
        for part in walk.parts.others:
            part.collect(content)
        leaves = (*walk.content.leaves.values(), *content.leaves.values())
        aliases = {group: dict(names) for group, names in walk.content.aliases.items()}
        values = self._values(walk.parts.groups, {**walk.content.values, **content.values})
        mesh = self._stated({**walk.content.mesh, **content.mesh})
        given = any(isinstance(part, NamedSnapshot) for part in walk.parts.others)
        steady = len(leaves if given else walk.content.leaves)
        return SnapshotOf(walk.parts, Snapshot(walk.parts.groups, leaves, values, aliases, mesh, steady))

    def _part_of(self, groups: Collection[str]) -> SnapshotOf:
        parts = self._parts()
        wanted = check_groups(groups, parts.groups)
        content = Content(known=self._known, frozen=frozen.keys(parts.named, parts.optimizers))
        self.gradients = frozen.note(parts.named)
        self.unsaved.record()
        for part in parts.all:
            # Optimizer state is placed as its parameters are, so a layout needs these as well.
            if part.groups & wanted or (self.declared is not None and part in parts.named):
                part.collect(content)
        kept = tuple(group for group in parts.groups if group in wanted)
        content = content if self.declared is None else self.declared.outward(content, _live(parts.named))
        snapshot = Snapshot(
            kept,
            tuple(leaf for leaf in content.leaves.values() if leaf.group in wanted),
            self._values(kept, content.values),
            {group: aliases for group, aliases in content.aliases.items() if group in wanted},
            self._stated(content.mesh),
            0,
        )
        return SnapshotOf(parts, snapshot)

    def _walked(self) -> _Walk:
        """Walk through everything, and record what detects later changes."""
        self._temporaries.refuse(self.state)
        parts = self._parts()
        content = Content(known=self._known, frozen=frozen.keys(parts.named, parts.optimizers))
        watch = ChangeWatch()
        for part in parts.named:
            part.collect(content)
        documents = tuple(optimizer.collect_tensors(content) for optimizer in parts.optimizers)
        later = frozenset[str]().union(*(part.groups for part in parts.others))  # collected at each snapshot
        self._known = {key: known for key, known in self._known.items() if key in content.leaves or key[0] in later}
        self.unsaved.record()
        for key, value in self.state.items():
            for module in modules_of(value):
                watch.see_module(module)
            if isinstance(value, Named):
                watch.see_named(value, key)
            if isinstance(value, OptimizerShards):
                continue
            if optimizer_wrappers.is_optimizer(value):
                watch.see_optimizers(value)
            elif not entries.is_loose(key, value) and isinstance(value, Mapping):
                watch.record(value)
        for optimizer in parts.optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                watch.see_shards(optimizer)
        if watch.possible:
            views = entries.views(self.state)
            watch.see_memory(parts.tensors(lambda key: key not in views), parts.tensors(views.__contains__))
        if self.declared is not None:
            content = self.declared.outward(content, _live(parts.named))
        self.gradients = frozen.note(parts.named)
        return _Walk(parts, content, documents, watch, self.gradients, dict(self.state))

    def _holds(self, walk: _Walk) -> bool:
        """Whether the state's entries are those of the walk, except plain values, which are read at every save."""
        return (
            list(self.state) == list(walk.entries)
            and all(now is walk.entries[key] or entries.is_value(key, now) for key, now in self.state.items())
            and all(now is walk.entries[key] or entries.is_value(key, walk.entries[key]) for key, now in self.state.items())
            and all(part.still_left_out() for part in walk.parts.named)
            and walk.gradients.as_noted()
            and walk.watch.unchanged()
            and not self._known_of_optimizers.for_all.pending
        )

    def prepare(  # noqa: PLR0913 - what a caller may wish, all optional
        self,
        stored: OfferedLeaves,
        groups: Collection[str] | None = None,
        ignore: Sequence[str] = (),
        strict: bool = True,
        from_model: Masters | None = None,
        cast: bool = False,
        keep: Sequence[str] = (),
        requantise: bool = False,
    ) -> MatchedLeaves:
        """Compare the live state with the checkpoint and determine where which bytes go; nothing live changes.

        `ignore` are patterns on `group/name`. Raises `StateMismatch` with the names of all tensors of a wrong shape or
        dtype; if strict, also of everything that only one side has; and for weights without their live masters, unless
        `from_model` sets these. Groups that the live state lacks are left out, with a note. With `cast`, floats of another
        dtype are rounded. `keep` are patterns over `key/hyper-parameter` that stay. With `requantise`, optimizer
        state in blocks of codes is quantised again where this rank has other blocks.
        """
        self._temporaries.refuse(self.state)
        parts = self._parts(stored)
        stored = optimizer_resume.under_key(stored, [optimizer.key for optimizer in parts.optimizers])
        stored = optimizer_resume.with_names(stored, parts.optimizers, self.declared is not None)
        wanted = check_groups(groups, parts.groups)
        if groups is None and from_model is not None and not stored.specs.get(MASTER):
            wanted -= {MASTER}  # the checkpoint has none: they are all set from the weights
        if keep:
            groups_now = [(optimizer.key, list(optimizer.groups_of_parameters())) for optimizer in parts.optimizers]
            check_keep(keep, [*groups_now, *scheduler_settings(self.state)])
        selection = Selection(wanted, tuple(ignore), cast, groups is not None, tuple(keep), requantise)
        beside = parts.beside_weights()
        if self.declared is None:
            found = match_leaves(parts.plans(stored, selection), stored, selection, strict)
            return parts.keeper.noting(settle(found, beside, from_model))
        live = _live(parts.named)
        shown = self.declared.inward(stored, selection.groups, live)
        self._walk = None if self.declared.program is not None else self._walk  # saves may have other names now
        plans = parts.plans(shown.stored, selection)
        for plan in plans:
            plan.wanted = [leaf for leaf in plan.wanted if leaf.key in shown.held or not live.is_empty(leaf)]
        found = settle(match_leaves(plans, shown.stored, selection, strict), beside, from_model)
        return parts.keeper.noting(land(found, shown.held, shown.notes, shown.moves_of))

    def _stated(self, of_tensors: dict[str, int]) -> dict[str, int]:
        """The mesh as a manifest has it, else that of the tensors."""
        return of_tensors if self.mesh is None else successors.stated(self.mesh)

    def _values(self, groups: Sequence[str], values: Mapping[Key, str]) -> dict[str, dict[str, str]]:
        by_group = _by_group(groups, values)
        if self.declared is not None and OPTIM in by_group:
            by_group[OPTIM] = {key: self.declared.outward_text(key, text) for key, text in by_group[OPTIM].items()}
        return by_group

    def _parts(self, stored: OfferedLeaves | None = None) -> Parts:
        """The present entries of the state: modules and tensors, then optimizers, then loaded objects, then random
        streams.
        """
        for key, value in self.state.items():
            entries.check_key(key)
            refuse_empty_lists(key, value, key in (MODEL, MASTER, EMA))
        modules = entries.module_groups(self.state)
        collections = [entries.named_tensors(key, value, modules, self.rank) for key, value in self.state.items()]
        tensors = [part for part in collections if part is not None]
        if self.declared is not None:  # it describes all ranks together, so everything is stored
            tensors = [part._replace(state=part.state._replace(unsaved=frozenset())) for part in tensors]
        for part in tensors:
            sharding_marks.check(part.path, part.state.tensors, self.world, self.declared is not None)
        divided = self.declared is not None and self.declared.divides
        optimizers_now = optimizers_of(self.state, tensors, divided, self._known_of_optimizers)
        tensors = keep_trained(tensors, (name for one in optimizers_now for name in one.parameter_names()))
        given = [value for value in self.state.values() if isinstance(value, NamedSnapshot)]
        others: list[AskedEntry] = [LoadHooks(self.state, self.unsaved), *given]
        keeper = ContainerKeeper()
        others += entries.loose(self.state, self.rank, keeper)
        groups = {part.group for part in tensors}.union(
            {EXTRA}, {OPTIM} if optimizers_now else (), *(g.groups for g in given)
        )
        stores_masters = stored is not None and MASTER in stored.specs and bool(stored.specs[MASTER])
        if (stores_masters and optimizers_now) or any(optimizer.has_masters() for optimizer in optimizers_now):
            groups.add(MASTER)
        ordered = sorted(
            groups, key=lambda group: (entries.GROUP_ORDER.index(group) if group in entries.GROUP_ORDER else 0, group)
        )
        for one in optimizers_now:
            if one.key not in self._numbers:
                self._numbers[one.key] = WrapperNumbers(one.key)
        counted = [SavedNumbers(self._numbers[one.key], self.state, self.rank) for one in optimizers_now]
        rest: list[AskedEntry] = [*counted, UnsavedState(self.unsaved), RandomState(self.rank, self.random)]
        return Parts(tuple(ordered), tuple(tensors), tuple(optimizers_now), (*others, *(() if given else rest)), keeper)


def _by_group(groups: Sequence[str], values: Mapping[Key, str]) -> dict[str, dict[str, str]]:
    by_group: dict[str, dict[str, str]] = {group: {} for group in groups}
    for (group, key), text in values.items():
        if group in by_group:
            by_group[group][key] = text
    return by_group


def _live(named: Sequence[NamedTensors]) -> Live:
    """Parameters and names of the live tensors. If a mapping is not a module, all its tensors count as parameters."""
    tensors = {(part.group, name): value for part in named for name, value in part.state.tensors.items()}
    foreign = frozenset(key for key, value in tensors.items() if is_sharded(value))
    model = next((part.state.tensors for group in (MODEL, MASTER) for part in named if part.group == group), {})
    parameters = [name for name, value in model.items() if isinstance(value, nn.Parameter)]
    return Live(
        tuple(parameters or model), foreign, frozenset(key for key, value in tensors.items() if 0 in value.shape) - foreign
    )
