"""A committed checkpoint as a mapping of tensors, for programs that read one: whole tensors, boxes, any rank's shard.

    with holdfast.open("run@latest", root="holdfast-data") as checkpoint:
        weight = checkpoint.read("model.embed_tokens.weight")
        shard = checkpoint.shard("tp=4,pp=2", rank=3, framework="torch")

No service need run where the directory can be seen, and torch is needed for `framework="torch"` alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import unquote

from holdfast.layout import rules_choice, shards
from holdfast.layout.rules_choice import LayoutSource, ProgramSource, RulesSource, program_of
from holdfast.layout.shards import Framework
from holdfast.read.checkpoint_index import open_source, parse_target
from holdfast.read.checkpoint_root import root_of
from holdfast.read.names import LATEST, LATEST_HEALTHY
from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import HttpSource, Source
from holdfast.rest.api import Api, Step
from holdfast_files.objects import address
from holdfast_formats import naming
from holdfast_formats.disk import coded, read_planner
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.read_planner import ReadPlan, WantedBox
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.parts import LocalTensor, of_box
from holdfast_formats.layout.rank_tensors import HeldTensors, LayoutHoldings, of_manifest
from holdfast_formats.programs.remade import remade_holdings
from holdfast_formats.region import Box, Shape, check_box, whole

_ADDRESS = re.compile(r"(https?://.+?)/v1/runs/([^/]+)/checkpoints/([^/]+)/?")


class TensorInfo(NamedTuple):
    """A stored tensor: safetensors dtype, shape in elements, size in bytes."""

    dtype: str
    shape: Shape
    bytes: int


class Checkpoint:
    """Reads one checkpoint and verifies every byte. A context manager, safe for threads. `holdfast.open()` makes one.

    Args:
        source: The files of the checkpoint, which are closed with it.
        cleanup: What else is closed with it.

    Raises:
        NotCommitted: If the checkpoint has no COMMIT.
        CorruptManifest: If its manifest is damaged.

    Example:
        >>> with holdfast.open("llama3-8b@latest", root="/fast/checkpoints") as checkpoint:
        ...     weight = checkpoint.read("model.embed_tokens.weight")
    """

    def __init__(self, source: Source, cleanup: ExitStack | None = None) -> None:
        self._cleanup = cleanup or ExitStack()
        try:
            self.reader = CheckpointReader.open(source)
        except BaseException:
            self._cleanup.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        thinned = "" if self.manifest.thinned is None else ", thinned"
        return f"<Checkpoint {self.run}@{self.step}: {', '.join(self.groups)}{thinned}>"

    def close(self) -> None:
        """Close the files or the connection; arrays that you read stay valid.

        Example:
            >>> checkpoint.close()
        """
        self.reader.close()
        self._cleanup.close()

    @property
    def manifest(self) -> Manifest:
        """The manifest: every file, tensor, shape, dtype and digest."""
        return self.reader.manifest

    @property
    def run(self) -> str:
        """The run's name."""
        return self.manifest.run

    @property
    def step(self) -> int:
        """The training step."""
        return self.manifest.step

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that have tensors or values, such as model and optim."""
        return self.manifest.groups

    @cached_property
    def tensors(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """The tensors as they were saved, by group, then by name."""
        return {
            group: {name: TensorInfo(entry.dtype, entry.shape, entry.nbytes) for name, entry in held.items()}
            for group, held in self.reader.contents.tensors.items()
        }

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The model's config.json, if the checkpoint has one that is a JSON object."""
        return rules_choice.config_of(self.reader)

    def read(self, name: str, box: Box | None = None, group: str = "model", framework: Framework = "numpy") -> Any:
        """Read a tensor, or a box of it, and verify it. An alias reads its tensor.

        Args:
            name: The tensor's name.
            box: A part: for each dimension its [start, stop) in elements; None for the whole tensor.
            group: The tensor's group.
            framework: `"numpy"` or `"torch"`: the type of the result.

        Returns:
            An array with the shape of the box, in the stored dtype.

        Raises:
            StateMismatch: For an unknown tensor or box.
            CorruptExtent: With file, tensor and range, if bytes differ from what was written.

        Example:
            >>> checkpoint.read("lm_head.weight", ((0, 1000), (0, 4096))).shape
            (1000, 4096)
        """
        shards.check_framework(framework)
        entry = self.reader.entry(group, name)
        box = Box(*map(tuple, box)) if box is not None else whole(entry.shape)
        check_box(box, entry.shape, name)
        return self.fill([of_box(name, entry.dtype, name, box)], group, framework)[name]

    def holding(
        self, layout: LayoutSource, group: str = "model", rules: RulesSource = None, program: ProgramSource = None
    ) -> LayoutHoldings:
        """Compute what every rank of a layout holds of a group. Reads only the model's config.json.

        Args:
            layout: The layout, as text such as `"tp=4,pp=2"`.
            group: The group.
            rules: A TOML file, or its content, that extends the built-in tables.
            program: A mapping program; the result has its tensors. A file, its text, or the name of a built-in program.

        Returns:
            The holdings; `of(rank)` returns those of a rank, in parts of stored tensors.

        Raises:
            InvalidRequest: For an invalid layout or program.
            StateMismatch: For a tensor that the layout cannot split, or the program cannot map.

        Example:
            >>> checkpoint.holding("tp=4").of(0).tensors[0].name
            'model.embed_tokens.weight'
        """
        wanted, extra, through = rules_choice.layout_of(layout), rules_choice.read_rules(rules), program_of(program)
        if through is None:
            return of_manifest(self.reader.contents, group, wanted, self.config, extra)
        return remade_holdings(self.reader.contents, group, wanted, self.config, extra, through)

    def held(
        self,
        layout: LayoutSource,
        rank: int,
        group: str = "model",
        rules: RulesSource = None,
        program: ProgramSource = None,
    ) -> HeldTensors:
        """Compute what one rank of a layout holds; for many ranks use `holding`.

        Args:
            layout: The layout, as text such as `"tp=4,pp=2"`.
            rank: The rank, from 0.
            group: The group.
            rules: A TOML file, or its content, that extends the built-in tables.
            program: A mapping program, as in `holding`.

        Returns:
            The rank's tensors, with notes on uneven splits, padding and replication.

        Raises:
            InvalidRequest: For an invalid layout, rank or program.
            StateMismatch: For a tensor that the layout cannot split, or the program cannot map.

        Example:
            >>> checkpoint.held("tp=4", rank=3).notes
            ()
        """
        return self.holding(layout, group, rules, program).of(rank)

    def shard(
        self,
        layout: LayoutSource,
        rank: int,
        group: str = "model",
        rules: RulesSource = None,
        framework: Framework = "numpy",
        program: ProgramSource = None,
    ) -> dict[str, Any]:
        """Read the local tensors of a rank in a layout; `held` describes them.

        Only needed extents are read, and all of them are verified. Tied tensors share one array; with a program, whose
        names differ, only the stored tensor is returned.

        Args:
            layout: The layout, as text such as `"tp=4,pp=2"`.
            rank: The rank, from 0.
            group: The group.
            rules: A TOML file, or its content, that extends the built-in tables.
            framework: `"numpy"` or `"torch"`: the type of the arrays.
            program: A mapping program, as in `holding`.

        Returns:
            The rank's arrays by name, each with its local shape.

        Raises:
            InvalidRequest: For an invalid layout, rank or program.
            StateMismatch: For a tensor that the layout cannot split, or the program cannot map.
            CorruptExtent: With file, tensor and range, if bytes differ from what was written.

        Example:
            >>> shard = checkpoint.shard("tp=4,pp=2", rank=3, framework="torch")
        """
        shards.check_framework(framework)
        wanted = rules_choice.layout_of(layout)
        arrays = self.fill(self.held(wanted, rank, group, rules, program).tensors, group, framework)
        if wanted.mesh.pp == 1 and program is None:  # with several stages, the other one has its own
            tied = self.reader.contents.aliases.get(group, {})
            arrays |= {alias: arrays[name] for alias, name in tied.items() if name in arrays and alias not in arrays}
        return arrays

    def plan(self, tensors: Sequence[LocalTensor], group: str = "model") -> ReadPlan:
        """Plan the reads that fill local tensors. Nothing is read.

        Args:
            tensors: Local tensors, such as those of `held`.
            group: Their group.

        Returns:
            The reads by file and position; `needed` counts the wanted bytes, `read` those of the reads with their gaps.

        Raises:
            StateMismatch: For an unknown tensor or box.

        Example:
            >>> checkpoint.plan(checkpoint.held("tp=4", rank=0).tensors).needed
            4294967296
        """
        wanted = (WantedBox(group, part.tensor, part.box) for local in tensors for part in local.parts)
        stored = (need for box in wanted for need in coded.stored_boxes(self.manifest, box))
        return read_planner.plan(self.manifest, stored)

    def fill(self, tensors: Sequence[LocalTensor], group: str = "model", framework: Framework = "numpy") -> dict[str, Any]:
        """Read local tensors from their parts, and verify them; padding is zero.

        Args:
            tensors: Local tensors, such as those of `held`.
            group: Their group.
            framework: `"numpy"` or `"torch"`: the type of the arrays.

        Returns:
            The arrays by name, each with its local shape.

        Raises:
            StateMismatch: For an unknown tensor or box.
            CorruptExtent: With file, tensor and range, if bytes differ from what was written.

        Example:
            >>> arrays = checkpoint.fill(checkpoint.held("tp=4", rank=0).tensors)
        """
        memory = [shards.allocate(local) for local in tensors]
        arrays = {local.name: shards.array(local, octets, framework) for local, octets in zip(tensors, memory, strict=True)}
        # The memory is returned only after all of it is verified, so one pass is enough.
        self.reader.load(
            want for local, octets in zip(tensors, memory, strict=True) for want in shards.wants(group, local, octets)
        )
        return arrays


def open(where: str | Path, *, root: str | Path | None = None, url: str | None = None) -> Checkpoint:
    """Open a committed checkpoint for reading.

    Args:
        where: A directory; RUN@STEP, RUN@latest, RUN@latest-healthy, RUN@best or RUN; or a URL:
            http://host:port/v1/runs/RUN/checkpoints/STEP, s3://bucket/prefix/RUN@STEP or s3://bucket/prefix/RUN@latest.
        root: The directory or the bucket, as s3://bucket/prefix, in which the run is looked up.
        url: The service at which it is looked up. Without `root` and `url`, it is looked up where the command line would
            look.

    Returns:
        The checkpoint. It is a context manager.

    Raises:
        NotFound: If there is no such run or checkpoint.
        NotCommitted: If the directory is not a complete checkpoint.
        CorruptManifest: If its manifest is damaged.

    Example:
        >>> with holdfast.open("llama3-8b@500", root="/fast/checkpoints") as checkpoint:
        ...     checkpoint.groups
        ('model', 'optim', 'extra')
    """
    cleanup = ExitStack()
    if isinstance(where, str) and "://" in where and not address.is_address(where):
        return Checkpoint(_addressed(where), cleanup)
    target = parse_target(str(where) if "/" in str(where) or isinstance(where, str) else f"./{where}")
    return Checkpoint(cleanup.enter_context(open_source(target, None if root is None else root_of(root), url)), cleanup)


def _addressed(address: str) -> Source:
    match = _ADDRESS.fullmatch(address)
    step = match[3] if match else ""
    named: Step | None = LATEST if step == LATEST else LATEST_HEALTHY if step == LATEST_HEALTHY else None
    if named is None and step.isascii() and step.isdigit():
        named = int(step)
    if match is None or named is None:
        raise InvalidRequest(f"{address!r} is not a checkpoint's URL", hint="http://HOST:PORT/v1/runs/RUN/checkpoints/STEP")
    api, run = Api(match[1]), naming.check_run(unquote(match[2]))
    try:
        return HttpSource(api, run, api.checkpoint(run, named).step)
    except BaseException:
        api.close()
        raise
