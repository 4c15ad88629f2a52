"""Lines to copy: how a trainer goes on from a checkpoint, and how a checkpoint is kept that this leaves behind."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from holdfast_formats.rest import bodies
from holdfast_formats.rest.runs import RunAbout, RunLaunch

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


def resume(checkpoint: bodies.CheckpointInfo, how: How, root: str, about: RunAbout | None = None) -> list[Snippet]:
    """The newest launch's own command, if its record has it, otherwise one for torchrun; for a loop of one's own, and for
    the Trainer of transformers. `root` is what `at=` takes.
    """
    started = next((found for launch in (about.launches if about else ()) if (found := _started(launch))), None)
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
    scripts = [
        Snippet("loop", "Python, your own loop", loop, "" if started else _NOTES[how]),
        Snippet("trainer", "transformers Trainer", attached),
    ]
    if started is not None:
        return [*_again(checkpoint, how, started), *scripts]
    ranks = f"Saved by {checkpoint.world} {'rank' if checkpoint.world == 1 else 'ranks'}; any number of ranks restores it."
    command = f"torchrun --standalone --nproc-per-node {min(checkpoint.world, RANKS_OF_A_MACHINE)} train.py"
    return [*scripts, *_with_step(checkpoint, how, Snippet("torchrun", "torchrun", f"{command}\n", ranks))]


_NOTES: dict[How, str] = {
    "newest": "Start the script again, unchanged: `restore()` restores the newest sound step.",
    "healthy": "A later start restores the newest healthy step again, so this line can stay.",
    "step": "For this launch only: remove the number afterwards, or the next start goes back to this step.",
}
_AGAIN: dict[How, str] = {
    "newest": _NOTES["newest"],
    "healthy": "In the script, `restore(healthy=True)` takes the newest healthy step. The line can stay.",
    "step": "The script must read the variable, see below.",
}


class _Started(NamedTuple):
    """How a launch was started, from its record."""

    launch: RunLaunch
    directory: str
    command: list[str]
    of_each_rank: bool  # what started the ranks is not known


def _started(launch: RunLaunch) -> _Started | None:
    """None if its record has no whole command. A trainer may have put anything there."""
    words, launcher, directory = (launch.info.get(name) for name in ("command", "launcher", "directory"))
    command = _words(launcher) or _words(words)
    if not command:
        return None
    each = launch.world > 1 and not _words(launcher)
    return _Started(launch, directory if isinstance(directory, str) else "", command, each)


def _words(value: Any) -> list[str]:
    words = [str(word) for word in value] if isinstance(value, list) else []
    return [] if any(word.startswith("… and ") for word in words) else words  # its end was not recorded


def _again(checkpoint: bodies.CheckpointInfo, how: How, started: _Started) -> list[Snippet]:
    lines = f"cd {shlex.quote(started.directory)}\n" if started.directory else ""
    ranks = started.launch.world
    notes = [
        _AGAIN[how],
        f"It ran on each of {ranks} ranks: start it with the launcher of this job." if started.of_each_rank else "",
        "`***` is a secret that was not recorded." if "***" in shlex.join(started.command) else "",
    ]
    title = f"The command of attempt {started.launch.attempt}"
    own = Snippet("again", title, f"{shlex.join(started.command)}\n", " ".join(filter(None, notes)))
    first, *others = _with_step(checkpoint, how, own)
    return [first._replace(lines=lines + first.lines), *others]


def _with_step(checkpoint: bodies.CheckpointInfo, how: How, command: Snippet) -> list[Snippet]:
    """Where a number is needed, the environment has it, so that the script stays as it is."""
    if how != "step":
        return [command]
    read = 'wanted = os.environ.get("RESUME_STEP")\nfirst = checkpointer.restore(step=int(wanted) if wanted else None) + 1\n'
    again = "Do not use `--max-restarts` here: restarted ranks would go back to this step."
    numbered = command._replace(
        lines=f"RESUME_STEP={checkpoint.step} {command.lines}", note=" ".join(filter(None, (command.note, again)))
    )
    reads = Snippet(
        "environment", "In the script", f"import os\n\n{read}", "Without the variable, the newest step is restored."
    )
    return [numbered, reads]


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
