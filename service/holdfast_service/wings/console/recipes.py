"""Lines to copy: how a trainer goes on from a checkpoint, and how a checkpoint is kept that this leaves behind."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal, NamedTuple

from holdfast_formats.rest import bodies

RANKS_OF_A_MACHINE = 8
# What restore() needs to take this step: nothing, since it is the newest; the newest healthy one; or its number.
How = Literal["newest", "healthy", "step"]


class Snippet(NamedTuple):
    """Lines to copy, what they are for, and what to know about them. `key` is the id of its element."""

    key: str
    title: str
    lines: str
    note: str = ""


class LeftBehind(NamedTuple):
    """The checkpoints that a launch abandons when it goes on from an older step."""

    steps: Sequence[int]
    more: bool  # than are listed
    keep: Snippet


def how_to_reach(checkpoint: bodies.CheckpointInfo, newer: Sequence[bodies.CheckpointInfo], healthy: int | None) -> How:
    """What restore() needs to take it, from the newer checkpoints of the run and its newest healthy step."""
    if checkpoint.state in ("abandoned", "damaged") or checkpoint.thinned is not None:
        return "step"
    if all(one.state in ("abandoned", "damaged") for one in newer):
        return "newest"
    return "healthy" if checkpoint.step == healthy else "step"


def place(nodes: bodies.Page[bodies.Node] | None, url: object) -> str:
    """What `at=` of a trainer takes: the root, or the service's address for viewers that are not shown it. Another directory
    would begin a training without its checkpoints.
    """
    return root_of(nodes) or str(url).rstrip("/")


def root_of(nodes: bodies.Page[bodies.Node] | None) -> str | None:
    """The root, for viewers that are shown it."""
    return nodes.items[0].root if nodes and nodes.items else None


def resume(checkpoint: bodies.CheckpointInfo, how: How, root: str) -> list[Snippet]:
    """For a loop of one's own, for the Trainer of transformers, and for torchrun. `root` is what `at=` takes."""
    run, step = checkpoint.run, checkpoint.step
    asked = {"newest": "", "healthy": "healthy=True", "step": f"step={step}"}[how]
    trainer = {"newest": "", "healthy": 'resume_from_checkpoint="latest-healthy"', "step": f"resume_from_checkpoint={step}"}
    loop = (
        "from holdfast import Checkpointer\n\n"
        f'with Checkpointer(\n    "{run}", state, at={root!r}\n) as checkpointer:\n'
        f"    first = checkpointer.restore({asked}) + 1\n"
        "    for step in range(first, steps + 1):\n"
        "        train(step)\n"
        "        if step % save_every == 0:\n"
        "            checkpointer.save(step)\n"
    )
    attached = (
        "from holdfast.integrations.transformers import attach\n\n"
        f'trainer = attach(\n    Trainer(model, arguments, train_dataset=data),\n    "{run}", at={root!r},\n)\n'
        f"trainer.train({trainer[how]})\n"
    )
    return [
        Snippet("loop", "Python, your own loop", loop, _NOTES[how]),
        Snippet("trainer", "transformers Trainer", attached),
        *_torchrun(checkpoint, how),
    ]


_NOTES: dict[How, str] = {
    "newest": "Start the script again, unchanged: `restore()` takes the newest sound step.",
    "healthy": "A later start again takes the newest healthy step, so this line can stay.",
    "step": "For this launch only: remove the number afterwards, or the next start goes back to this step.",
}


def _torchrun(checkpoint: bodies.CheckpointInfo, how: How) -> list[Snippet]:
    """Where a number is needed, the environment has it, so that the script stays as it is."""
    command = f"torchrun --standalone --nproc-per-node {min(checkpoint.world, RANKS_OF_A_MACHINE)} train.py\n"
    ranks = f"Saved by {checkpoint.world} {'rank' if checkpoint.world == 1 else 'ranks'}; any number of ranks restores it."
    if how != "step":
        return [Snippet("torchrun", "torchrun", command, ranks)]
    read = 'wanted = os.environ.get("RESUME_STEP")\nfirst = checkpointer.restore(step=int(wanted) if wanted else None) + 1\n'
    again = "Do not use `--max-restarts` here: restarted ranks would go back to this step."
    return [
        Snippet("torchrun", "torchrun", f"RESUME_STEP={checkpoint.step} {command}", f"{ranks} {again}"),
        Snippet("environment", "In train.py", f"import os\n\n{read}", "Without the variable, the newest step is taken."),
    ]


def left_behind(
    checkpoint: bodies.CheckpointInfo, newer: Sequence[bodies.CheckpointInfo], more: bool, root: str
) -> LeftBehind | None:
    """What goes when training goes on from this step; None if nothing newer is on its line. `newer` is newest first."""
    steps = [one.step for one in newer if not one.abandoned]
    if not steps:
        return None
    newest, name = steps[0], f"{checkpoint.run}-{steps[0]}"
    keep = f"holdfast export {checkpoint.run}@{newest} {name} --root {shlex.quote(root)}\n"
    return LeftBehind(steps, more, Snippet("keep", f"Keep step {newest}", keep))
