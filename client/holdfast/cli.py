"""The `holdfast` command: name, help and subcommands."""

from __future__ import annotations

import sys
from typing import Annotated, ClassVar

import typer

from holdfast.terminal.lazy_group import LazyCommand, LazyGroup
from holdfast_formats import model_building

EXIT_STATUSES = (
    "Exit status: 0 done · 1 something needs to be fixed (doctor), or another error · 2 the request is wrong · "
    "3 not found · 4 conflict with the current state · 5 damaged: do not trust these bytes · 6 unavailable: "
    "try again later · 7 denied: another token is needed."
)


def _entry(module: str, line: str, attribute: str | None = None, **settings: object) -> LazyCommand:
    return LazyCommand(f"holdfast.commands.{module}", attribute or module.rpartition(".")[2], line, settings)


# serve hands its flags on as they are: the daemon's own parser is the one place that knows them.
_AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


class Commands(LazyGroup):
    """All commands, in the order in which they are listed."""

    epilog_of_each: ClassVar = EXIT_STATUSES
    entries: ClassVar = {
        "serve": _entry(
            "serve",
            "Run this machine's checkpoint daemon until it is interrupted. `holdfast serve --help` lists its flags.",
            add_help_option=False,
            context_settings=_AS_GIVEN,
        ),
        "ls": _entry("ls", "List runs, or the checkpoints of one run, newest first."),
        "show": _entry("show", "Show a checkpoint: origin, files and tensors."),
        "stats": _entry(
            "stats",
            "Show statistics of every tensor: NaN and infinities, range, mean, rms, zeros, and the change.",
        ),
        "verify": _entry(
            "verify",
            "Read a checkpoint back and check every byte of every file.",
        ),
        "repair": _entry(
            "repair",
            "Read a checkpoint back and repair every damaged file from replicas, the in-memory checkpoint or the manifest.",
        ),
        "diff": _entry(
            "diff",
            "Compare two checkpoints: which tensors are equal, missing or reshaped, and how far the others are apart.",
        ),
        "restore": _entry(
            "restore",
            "Copy a checkpoint and verify every byte on the way: unchanged, or resharded into one file per rank.",
        ),
        "export": _entry("export", "Copy a checkpoint to a directory and verify every byte on the way."),
        "convert": _entry(
            "export", "Convert a checkpoint of one program to one of another, directory to directory.", "convert"
        ),
        "keep": _entry(
            "retention",
            "Set the retention policy of a run, or show it.",
            "keep",
        ),
        "pin": _entry("labels_and_pins", "Pin a checkpoint.", "pin"),
        "unpin": _entry("labels_and_pins", "Unpin a checkpoint.", "unpin"),
        "label": _entry("labels_and_pins", "Label a checkpoint.", "label"),
        "rm": _entry(
            "labels_and_pins",
            "Remove a checkpoint, or move a whole run to the trash.",
            "rm",
        ),
        "undelete": _entry("runs.trash", "Bring a deleted run back from the trash.", "undelete"),
        "trash": _entry("runs.trash", "List deleted runs that can be brought back, and the space that they take.", "trash"),
        "note": _entry(
            "runs.lifecycle", "Set owner and notes of a run; without options, show what is remembered of it.", "note"
        ),
        "acknowledge": _entry(
            "runs.lifecycle",
            "Acknowledge that a run has died: it is idle then, and raises no alert until it dies again.",
            "acknowledge",
        ),
        "archive": _entry("runs.lifecycle", "Put a run away: it keeps its checkpoints and raises no alert.", "archive"),
        "rename": _entry("runs.lifecycle", "Rename a run without connected ranks.", "rename"),
        "open": _entry("serve", "Open the dashboard in a browser, signed in.", "open"),
        "top": _entry(
            "top",
            "Show how the checkpointing of all runs goes: last commit, exposure, stall, interval, and what needs attention.",
        ),
        "nodes": _entry(
            "nodes", "Show the nodes that share this service's catalog: whether they are live, their ranks, duties and lag."
        ),
        "watch": _entry(
            "watch",
            "Show events as they happen, until interrupted.",
        ),
        "wait": _entry(
            "wait",
            "Wait until a step is a checkpoint that was read back, or until the daemon has written and verified all saves.",
        ),
        "doctor": _entry("doctor", "Check this machine: software, memory, storage, daemon."),
        "bench": _entry(
            "bench", "Measure memory, digests and the disk under --root, and estimate how long saves and restores take here."
        ),
        "demo": _entry(
            "demo", "Train a small Llama on two ranks, kill it, resume it, and compare it with a run that was left alone."
        ),
        "import": _entry(
            "import_",
            "Create a committed checkpoint from a checkpoint of another program.",
        ),
        "merge": _entry("import_", "Merge checkpoints of one architecture into a new one", "merge"),
        "jobs": _entry("jobs", "Submit, list, watch and cancel background jobs of the service.", "app"),
        "notify": _entry(
            "notifications.notify",
            "Show where the daemon sends alerts (`serve --notify FILE`), and send test messages.",
            "app",
        ),
        "token": _entry("access.token", "Create, rotate, list and revoke the tokens that the service requires.", "app"),
        "quota": _entry("access.quota", "Show and set how many bytes all runs of a team may hold together.", "app"),
        "whoami": _entry("access.whoami", "Show your name for the service, and your permissions."),
        "audit": _entry("access.audit", "Show the audit log: every change, and every refused request, newest first."),
        "programs": _entry(
            "programs", "Mapping programs: how the tensors of one layout of names become those of another.", "app"
        ),
        "catalog": _entry(
            "catalog", "The catalog is an index of the checkpoint directories: check that both agree, or rebuild it.", "app"
        ),
    }


app = typer.Typer(
    name="holdfast",
    cls=Commands,
    help="Checkpoints for model training: saved without stalling, verified by digests, restored to any parallel layout.",
    epilog=EXIT_STATUSES,
    no_args_is_help=True,
    pretty_exceptions_enable=sys.stderr.isatty(),
    pretty_exceptions_show_locals=False,  # they could show secrets
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from . import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    """The entry point of the `holdfast` script."""
    model_building.build_late()
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # httpx's own command: a tenth of a second
    app()
