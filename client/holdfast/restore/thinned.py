"""Refuses to restore groups that a thinned checkpoint no longer has, and names the step that still has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, suppress

from holdfast.link.session import Choice
from holdfast.read.root_directory import committed_steps
from holdfast.read.sources import DirectorySource
from holdfast.rest.api import Api
from holdfast_files.opened import read_placement
from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.thinning import USABLE_FOR
from holdfast_formats.errors import CheckpointError, CheckpointThinned, Damaged


def refuse(manifest: Manifest, choice: Choice, groups: Collection[str]) -> None:
    """`CheckpointThinned` if the checkpoint lost one of these groups, with the nearest step that has all."""
    gone = [group for group in groups if manifest.thinned is not None and group in manifest.thinned.groups]
    if not gone or manifest.thinned is None:
        return
    left = tuple(group for group in groups if group not in gone)
    nearest = _nearest(manifest.run, manifest.step, choice, groups)
    whole = "no step still has all of them" if nearest is None else f"the nearest step that still has them is {nearest}"
    masters = ', masters="from-model"' if "master" in gone or "optim" in gone else ""
    weights = f"restore(step={manifest.step}, groups={left}{masters}) takes its weights" if left else "its weights are there"
    lost = f"was thinned at {manifest.thinned.at}, and no longer has {', '.join(gone)}"
    raise CheckpointThinned(
        f"{manifest.run}@{manifest.step} {lost}: it is for {USABLE_FOR}",
        hint=f"{whole}; {weights}",
        groups=gone,
        nearest=nearest,
    )


def _nearest(run: str, step: int, choice: Choice, groups: Collection[str]) -> int | None:
    with suppress(CheckpointError):  # whatever is wrong there, the refusal is the news
        steps = (found for found, held in _offers(run, step, choice) if set(groups) <= set(held))
        return _closest(steps, step)
    return None


def _offers(run: str, step: int, choice: Choice) -> Iterator[tuple[int, Collection[str]]]:
    """Steps and their groups; from the directory the closest first."""
    if choice.root is None:
        if choice.url is not None:
            with Api(choice.url) as api:
                yield from (
                    (checkpoint.step, checkpoint.groups) for checkpoint in api.checkpoints(run) if checkpoint.damage is None
                )
        return
    for checkpoint in sorted(committed_steps(choice.root, run), key=lambda other: abs(other - step)):
        with suppress(Damaged), closing(DirectorySource(choice.root / naming.checkpoint_path(run, checkpoint))) as source:
            yield checkpoint, read_placement(source).groups


def _closest(steps: Iterable[int], step: int) -> int | None:
    return min(steps, key=lambda other: abs(other - step), default=None)
