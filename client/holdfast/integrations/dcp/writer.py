"""Saves a DCP state dict as a Holdfast checkpoint."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, SupportsIndex

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.integrations.dcp import names, runs, steps
from holdfast.integrations.dcp.contents import contents
from holdfast.link import address
from holdfast.stage.save_request import check_choices, check_metrics, check_step
from holdfast.state import assets as asset_files
from holdfast.tickets import SaveTicket
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.lineage import Existing

_DONE = "holdfast"  # the name of what each rank reports as written


class HoldfastStorageWriter(StorageWriter):
    """A storage writer for `dcp.save` and `dcp.async_save`.

    Every rank makes one. `at` is the daemon's location, as for a Checkpointer. The step is given here, or as DCP's
    `checkpoint_id`, if one writer is used for several steps. `assets` are stored with the weights. `existing` decides
    what happens if the step exists; without it, a step that this launch has saved or loaded is replaced, and another
    one refused.

    A save returns when the step is committed. If that fails on any rank, every rank raises DCP's CheckpointException.
    """

    def __init__(  # noqa: PLR0913 - the public entry: one required argument, six options, named
        self,
        run: str,
        *,
        step: SupportsIndex | None = None,
        at: str | os.PathLike[str] | None = None,
        assets: Any = None,
        metrics: Mapping[str, float] | None = None,
        keep_last: int | None = None,
        existing: Existing | None = None,
    ) -> None:
        """Connects nothing yet. Raises `InvalidRequest` for invalid names and options."""
        self.run = naming.check_run(run)
        self.step = None if step is None else check_step(step)
        place = address.place(at)
        self._at = at if at is None or place.url is not None else str(place.socket or place.root)
        self._assets, self._metrics = asset_files.collect(assets), check_metrics(metrics or {})
        if existing is not None:
            check_choices(None, existing)
        self._existing, self._keep_last = existing, keep_last
        self._ticket: SaveTicket | None = None
        self._part: runs.RankPart | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, including loaded steps: an asynchronous save in a process continues from them."""
        kept = {name: value for name, value in vars(self).items() if name not in ("_ticket", "_part")}
        return {**kept, "_ticket": None, "_part": None, "_loaded": self._process.loaded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        loaded = state.pop("_loaded")
        vars(self).update(state)
        if loaded is not None:
            self._process.take_loaded(loaded)

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint as DCP logs it: RUN@STEP."""
        return f"{self.run}@{self.step}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save. A `checkpoint_id` is its step: a number, or a path that ends in one."""
        self._ticket = self._part = None
        if checkpoint_id is not None:
            self.step = steps.of_id(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Before planning, refuse a save without a step, and one in which ranks do not plan together."""
        if self.step is None:
            raise InvalidRequest(
                "the step of this save is unknown",
                hint="use HoldfastStorageWriter(run, step=…), or dcp.save(…, checkpoint_id=step)",
            )
        if not kwargs.get("use_collectives", True):
            raise InvalidRequest(
                "use_collectives=False is not supported, because the ranks must exchange their plans",
                hint="leave use_collectives out, or pass no_dist=True if one rank saves alone",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its part. Plans that a planner caches are empty here: their groups stay."""
        process = self._process
        heads = {str(path[0]) for plan in plans for path in _paths(plan)}
        kept = process.groups if not all(getattr(plan, "usable", True) for plan in plans) else frozenset()  # since torch 2.7
        process.groups = names.groups_of(heads) | kept
        launch = process.launch()
        return [
            dataclasses.replace(plan, storage_data=runs.RankPart(rank, len(plans), launch, process.groups, process.origin))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's part into the daemon's memory, after refusing what cannot be stored."""
        part = plan.storage_data
        if not isinstance(part, runs.RankPart):
            raise InvalidRequest(
                f"the plan was made for another storage writer: it has a {type(part).__name__}",
                hint="do not use enable_plan_caching=True with several kinds of writers: planners share plans by class",
            )
        assert self.step is not None  # set_up_storage_writer refuses that
        process = self._process
        given = contents(plan, planner, process.parts, part.groups)
        asked = runs.Asked(self.step, self._existing, self._metrics or None, self._assets or None)
        self._part, self._ticket = part, process.save(part, given, asked, self._keep_last)
        written = [WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result([*written, WriteResult(MetadataIndex(_DONE), 0, (self.run, self.step, part.launch))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Wait for the commit, and raise its error. DCP informs the other ranks."""
        assert self._ticket is not None and self._part is not None  # write_data came before, in this process
        saved = {str(result.storage_data) for written in results for result in written if result.index.fqn == _DONE}
        if len(saved) != 1 or len(results) != self._part.world:
            raise StateMismatch(
                f"the ranks save different steps or runs: {', '.join(sorted(saved))}",
                hint="construct the HoldfastStorageWriter with the same run and step on all ranks",
            )
        self._ticket.result()
        metadata.storage_meta = self.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            steps.of_id(checkpoint_id)
        except InvalidRequest:
            return False
        return True

    def close(self) -> None:
        """Disconnect from the daemon; the end of the process does it too."""
        self._process.close()

    @property
    def _process(self) -> runs.RunOfProcess:
        return runs.of(self.run, self._at)


def _paths(plan: SavePlan) -> list[names.Path]:
    if isinstance(plan.planner_data, Mapping):
        return [path for path in plan.planner_data.values() if path]
    return [(item.index.fqn,) for item in plan.items]
