"""Ray Train: a checkpoint is reported to Ray as soon as it is committed, and never before.

    from holdfast.integrations import ray as holdfast_ray

    def train_func(config):                                     # for a TorchTrainer
        ...
        with Checkpointer("llama3-8b", state, at="/fast/checkpoints", policy="wait") as checkpointer:
            for step in range(checkpointer.restore() + 1, steps + 1):
                loss = train(step)
                if step % 500 == 0:
                    holdfast_ray.report(checkpointer, step, {"loss": loss})       # in place of ray.train.report()

Ray gets a small directory of its own, with links to the checkpoint: if Ray removes it, only the links are removed.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict

from holdfast.checkpointer import Checkpointer
from holdfast.link.checkpoint_links import unlink
from holdfast.stage.save_request import Check, Wait
from holdfast.tickets import SaveTicket
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.lineage import Existing

if TYPE_CHECKING:
    from typing_extensions import Unpack

POINTER = "holdfast.json"  # run and step of a directory of Ray's
_POINTER_BYTES_MAX = 64 * 1024
_MARK = "_holdfast_swept"  # on Ray's context of this worker: what dead workers left behind was removed


class SaveOptions(TypedDict, total=False):
    """The options of `Checkpointer.save`."""

    groups: Any
    wait: Wait | None
    check: Check | None
    existing: Existing
    assets: Mapping[str, Any] | None


def report(
    checkpointer: Checkpointer, step: SupportsIndex, metrics: Mapping[str, Any], **options: Unpack[SaveOptions]
) -> SaveTicket:
    """Save, and report the metrics to Ray together with the checkpoint once it is committed. Training continues in the
    meantime.

    Every worker calls it, in place of `ray.train.report()`, with the same step. `options` are those of
    `Checkpointer.save`; metrics that are numbers are stored with the checkpoint, too. If the save fails later, nothing
    is reported, and Ray ends this attempt of the training with the error, as it does when an upload of its own fails.

    Raises what `Checkpointer.save` raises, and `InvalidRequest`, before anything is saved: outside of a Ray Train worker,
    for a Checkpointer that may drop saves or of another world, and for a root in Ray's temporary directory.
    """
    import ray.train

    context = _context()
    _refuse(checkpointer, context)
    number = int(step.__index__())
    numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
    ticket = checkpointer.save(number, metrics=numbers, **options)
    asynchronous = ray.train.CheckpointUploadMode.ASYNC
    if context.get_world_rank() != 0:  # Ray's workers report equally often
        ray.train.report(dict(metrics), checkpoint_upload_mode=asynchronous)
        return ticket
    storage = context.get_storage()
    _sweep(context, checkpointer.run)
    name = f"{naming.step_directory(number)}.{uuid.uuid4().hex[:12]}"  # new each time: Ray removes directories by name
    directory = storage.build_checkpoint_path_from_name(name)
    if _is_local(storage.storage_filesystem):
        _link(checkpointer, ticket, Path(directory))

    def committed(checkpoint: Any, _: str) -> Any:
        _await_commit(ticket, checkpoint)
        return checkpoint

    ray.train.report(
        dict(metrics),
        checkpoint=ray.train.Checkpoint(directory, filesystem=storage.storage_filesystem),
        checkpoint_dir_name=name,
        checkpoint_upload_mode=asynchronous,
        delete_local_checkpoint_after_upload=False,
        checkpoint_upload_fn=committed,
    )
    return ticket


def step(checkpoint: Any, run: str) -> int | None:
    """The step of a checkpoint of Ray's, such as `ray.train.get_checkpoint()`, for `restore(step)`; None for None.

    Raises `InvalidRequest` for a checkpoint not made by `report`, and for one of another run.
    """
    if checkpoint is None:
        return None
    try:
        with checkpoint.filesystem.open_input_stream(str(PurePosixPath(checkpoint.path, POINTER))) as file:
            document = json.loads(file.read(_POINTER_BYTES_MAX))
        saved_run, number = document["run"], naming.check_step(document["step"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(
            f"{checkpoint} was not saved by Holdfast: its {POINTER} is missing, or has no step",
            hint="load Ray's or your own checkpoint as before, then save once with Holdfast",
        ) from error
    if saved_run != run:
        raise InvalidRequest(
            f"{checkpoint} is step {number} of the run {saved_run!r}, not of {run!r}",
            hint="give each run of Holdfast a RunConfig(name=…) of its own",
        )
    return number


def _context() -> Any:
    from ray.train.v2._internal.execution.context import get_train_context

    try:
        return get_train_context()
    except RuntimeError as error:
        raise InvalidRequest(
            "report() was called outside a Ray Train worker",
            hint="call it in the training function of a TorchTrainer; elsewhere, checkpointer.save() is enough",
        ) from error


def _refuse(checkpointer: Checkpointer, context: Any) -> None:
    """Refuse a Checkpointer whose saves could be dropped or incomplete."""
    if checkpointer.policy != "wait":
        raise InvalidRequest(
            f"this Checkpointer may drop a save that was reported to Ray: its policy is {checkpointer.policy!r}",
            hint='construct it with Checkpointer(…, policy="wait")',
        )
    if checkpointer.world != context.get_world_size():
        raise InvalidRequest(
            f"the Checkpointer has world size {checkpointer.world}, but Ray Train has {context.get_world_size()}",
            hint="use a TorchTrainer, which initializes torch.distributed, and construct the Checkpointer in its "
            "training function",
        )
    root, temporary = checkpointer.root(), Path(os.path.realpath(_temporary()))
    if root is not None and temporary in Path(os.path.realpath(root)).parents:
        raise InvalidRequest(
            f"{root} is in this Ray session's directory, which the next session does not have",
            hint="Ray starts workers in such a directory: give an absolute path as at=, or an address",
        )


def _temporary() -> str:
    """Ray's temporary session directory, which a restart creates again."""
    from ray.train.constants import _get_ray_train_session_dir

    return str(Path(_get_ray_train_session_dir()).parent)


def _link(checkpointer: Checkpointer, ticket: SaveTicket, directory: Path) -> None:
    """Make the directory, with the link that keeps the checkpoint, if the checkpoint will be on this machine."""
    directory.mkdir(parents=True, exist_ok=True)
    if checkpointer.root() is not None:
        checkpointer.link(ticket, directory / naming.step_directory(ticket.step), required=False)


def _await_commit(ticket: SaveTicket, checkpoint: Any) -> None:
    """Return when the checkpoint is committed and its directory is complete. Runs in Ray's upload thread."""
    try:
        ticket.result()
    except CheckpointError:
        if _is_local(checkpoint.filesystem):
            _remove(Path(checkpoint.path))
        raise
    if _is_local(checkpoint.filesystem):
        _link_files(Path(checkpoint.path), naming.step_directory(ticket.step))
    checkpoint.filesystem.create_dir(checkpoint.path)
    with checkpoint.filesystem.open_output_stream(str(PurePosixPath(checkpoint.path, POINTER))) as file:
        file.write(json.dumps({"run": ticket.run, "step": ticket.step}).encode())


def _link_files(directory: Path, link: str) -> None:
    """Link the checkpoint's files, so that `from_pretrained` loads Ray's directory, too."""
    if (directory / link).is_dir():
        for name in os.listdir(directory / link):
            (directory / name).symlink_to(PurePosixPath(link, name))


def _sweep(context: Any, run: str) -> None:
    """Remove directories that a killed worker made before Ray knew of them: their links would keep checkpoints for
    ever.

    Done once a worker, before its first report, when Ray's list is complete.
    """
    import ray.train

    if getattr(context, _MARK, False):
        return
    setattr(context, _MARK, True)
    storage = context.get_storage()
    place = Path(storage.experiment_fs_path)
    if not _is_local(storage.storage_filesystem) or not place.is_dir():
        return
    mode = ray.train.CheckpointConsistencyMode.COMMITTED
    known = {Path(one.checkpoint.path).name for one in context.get_all_reported_checkpoints(mode)}
    for path in place.iterdir():
        number = naming.parse_step_directory(path.name.partition(".")[0])
        if number is None or path.name in known or path.is_symlink() or not path.is_dir():
            continue
        link = path / naming.step_directory(number)
        left = not any(path.iterdir()) or (link.is_symlink() and naming.linked_step(run, os.readlink(link)) == number)
        if left:
            _remove(path)


def _remove(directory: Path) -> None:
    """Remove a directory of links and its pointer, but no target of a link."""
    with suppress(OSError):  # it is unreadable, or has other files, too
        unlink(path for path in directory.iterdir() if path.is_symlink() or path.name == POINTER)
        directory.rmdir()


def _is_local(filesystem: Any) -> bool:
    import pyarrow.fs

    return isinstance(filesystem, pyarrow.fs.LocalFileSystem)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
