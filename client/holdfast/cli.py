"""The `holdfast` command: name, help and subcommands."""

from __future__ import annotations

import sys
from typing import Annotated, ClassVar

import typer

from holdfast.terminal.lazy_group import Entry, LazyGroup
from holdfast_formats import model_building


def _entry(module: str, line: str, *examples: str, attribute: str | None = None, **settings: object) -> Entry:
    return Entry(f"holdfast.commands.{module}", attribute or module.rpartition(".")[2], line, examples, settings)


# serve hands its flags on as they are: the daemon's own parser is the one place that knows them.
_AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

_GROUPS = {
    "Look": {
        "ls": _entry(
            "ls",
            "List runs, or the checkpoints of one run, newest first.",
            "holdfast ls --sort -storage",
            "holdfast ls llama3-8b --healthy --since 3d",
        ),
        "show": _entry(
            "show",
            "Show a checkpoint: origin, files and tensors.",
            "holdfast show llama3-8b@500",
            "holdfast show llama3-8b@latest-healthy --json",
        ),
        "stats": _entry(
            "stats",
            "Show statistics of every tensor. These are NaN and infinities, range, mean, rms, zeros, and the change.",
            "holdfast stats llama3-8b@500 --sort nonfinite --first 10",
        ),
        "diff": _entry(
            "diff",
            "Compare two checkpoints. It lists which tensors are equal, missing or reshaped, and how much the "
            "others differ.",
            "holdfast diff llama3-8b@400 500 --group model",
            "holdfast diff ./copy llama3-8b@500 --fast",
        ),
        "top": _entry(
            "top",
            "Show how all runs are checkpointed. Runs that need attention come first.",
            "holdfast top team-a- --once",
        ),
        "storage": _entry(
            "runs.storage",
            "Show storage by run and by the age of checkpoints.",
            "holdfast storage team-a- --first 10",
            attribute="storage",
        ),
        "nodes": _entry(
            "nodes",
            "Show the nodes that share this catalog. Each has its state, ranks, duties and lag.",
            "holdfast nodes",
            "holdfast nodes --forget gpu-17",
        ),
        "events": _entry(
            "events",
            "Show the events of all runs, or of one, oldest first.",
            "holdfast events llama3-8b --since 2h",
            "holdfast events --kind save-aborted --follow",
        ),
        "open": _entry(
            "serve",
            "Open the dashboard in a browser, signed in.",
            "holdfast open",
            "holdfast open --print",
            attribute="open",
        ),
    },
    "Check and repair": {
        "verify": _entry(
            "verify",
            "Read a checkpoint back and check every byte of every file.",
            "holdfast verify llama3-8b@latest",
            "holdfast verify ./copy",
        ),
        "repair": _entry(
            "repair",
            "Read a checkpoint back and repair damaged files. Sources: replicas, the in-memory checkpoint, the manifest.",
            "holdfast repair llama3-8b@500",
            "holdfast repair llama3-8b@500 --root /fast/checkpoints --from /nas/checkpoints",
        ),
        "doctor": _entry(
            "doctor", "Check this machine: software, memory, storage, daemon.", "holdfast doctor --root /fast/checkpoints"
        ),
        "bench": _entry(
            "bench",
            "Measure this machine: memory, digests and the disk. Estimates how long saves and restores take here.",
            "holdfast bench --root /fast/checkpoints --state-gib 96",
        ),
    },
    "Copy": {
        "restore": _entry(
            "restore",
            "Copy a checkpoint, as it is or resharded for ranks. Every byte is verified on the way.",
            "holdfast restore llama3-8b@500 --out copy",
            "holdfast restore llama3-8b@500 --layout tp=2,pp=2,rules=llama --all-ranks shards",
        ),
        "export": _entry(
            "export",
            "Export a checkpoint, also in the format of another program. Every byte is verified on the way.",
            "holdfast export llama3-8b@500 release --model-only",
            "holdfast export llama3-8b@500 release --as hf --weights ema --dtype bf16",
        ),
        "import": _entry(
            "import_",
            "Import a checkpoint of another program.",
            "holdfast import ./Llama-3-8B llama3-8b@0 --dry-run",
            "holdfast import ./Llama-3-8B llama3-8b@0 --root /fast/checkpoints",
        ),
        "convert": _entry(
            "export",
            "Convert between programs, directory to directory.",
            "holdfast convert ./checkpoint-500 ./release --as hf --dtype bf16",
            attribute="convert",
        ),
        "merge": _entry(
            "import_",
            "Merge checkpoints of one architecture into a new one.",
            "holdfast merge recipe.yml merged@0 --dry-run",
            "holdfast merge llama3-8b merged@0 --average-last 5",
            attribute="merge",
        ),
    },
    "Keep and remove": {
        "keep": _entry(
            "retention",
            "Set the retention policy of a run, or show it.",
            "holdfast keep llama3-8b",
            "holdfast keep llama3-8b --last 2 --every-steps 1000 --dry-run",
            attribute="keep",
        ),
        "pin": _entry("labels_and_pins", "Pin a checkpoint.", "holdfast pin llama3-8b@500", attribute="pin"),
        "unpin": _entry("labels_and_pins", "Unpin a checkpoint.", "holdfast unpin llama3-8b@500", attribute="unpin"),
        "label": _entry(
            "labels_and_pins",
            "Label a checkpoint.",
            "holdfast label llama3-8b@500 release-1",
            "holdfast label llama3-8b@500 release-1 --remove",
            attribute="label",
        ),
        "rm": _entry(
            "labels_and_pins",
            "Remove a checkpoint, or move a whole run to the trash.",
            "holdfast rm llama3-8b@500 --dry-run",
            "holdfast rm old-sweep -y",
            attribute="rm",
        ),
        "trash": _entry(
            "runs.trash",
            "List deleted runs that can be brought back.",
            "holdfast trash",
            "holdfast trash --empty old-sweep",
            attribute="trash",
        ),
        "undelete": _entry(
            "runs.trash", "Bring a deleted run back from the trash.", "holdfast undelete old-sweep", attribute="undelete"
        ),
        "rename": _entry(
            "runs.lifecycle",
            "Rename a run without connected ranks.",
            "holdfast rename test-3 llama3-8b-long",
            attribute="rename",
        ),
        "note": _entry(
            "runs.lifecycle",
            "Set or show owner, notes and tags of a run.",
            "holdfast note llama3-8b --owner alice --notes 'second data mix'",
            "holdfast note llama3-8b-lr2 --tag sweep:lr --untag draft",
            attribute="note",
        ),
        "tags": _entry(
            "runs.tags",
            "List the tags of runs, or the runs of one tag. Each has its best and last metric.",
            "holdfast tags",
            "holdfast tags sweep:lr --metric loss",
            attribute="tags",
        ),
        "acknowledge": _entry(
            "runs.lifecycle",
            "Acknowledge that a run has died. The run is then idle, and raises no alert until it dies again.",
            "holdfast acknowledge llama3-8b",
            attribute="acknowledge",
        ),
        "archive": _entry(
            "runs.lifecycle",
            "Archive a run: it keeps its checkpoints and raises no alerts.",
            "holdfast archive old-sweep",
            attribute="archive",
        ),
    },
    "Operate": {
        "serve": _entry(
            "serve",
            "Run this machine's checkpoint daemon until it is interrupted.",
            "holdfast serve --root /fast/checkpoints --keep 5",
            add_help_option=False,
            context_settings=_AS_GIVEN,
        ),
        "wait": _entry(
            "wait",
            "Wait for a step, or until all saves are done. A save is done once it is written and verified.",
            "holdfast wait llama3-8b@500 --timeout 3600 && python evaluate.py",
            "holdfast wait --idle && systemctl poweroff",
        ),
        "jobs": _entry(
            "jobs",
            "Submit, list, watch and cancel background jobs.",
            "holdfast jobs ls --state running",
            "holdfast jobs show 12 --follow",
            "holdfast jobs submit verify llama3-8b@500 --follow",
            "holdfast jobs cancel 12",
            attribute="app",
        ),
        "catalog": _entry(
            "catalog",
            "Check or rebuild the catalog. It is an index of the checkpoint directories.",
            "holdfast catalog check",
            "holdfast catalog rebuild --root /fast/checkpoints",
            "holdfast catalog adopt --root /fast/checkpoints --catalog postgresql://db/holdfast",
            attribute="app",
        ),
        "notify": _entry(
            "notifications.notify",
            "Show where alerts are sent, and send test messages. Targets are configured in the file of `serve --notify`.",
            "holdfast notify ls",
            "holdfast notify test team-chat",
            attribute="app",
        ),
        "programs": _entry(
            "programs",
            "Show and check mapping programs. A program maps tensors with the names of one framework to those of another.",
            "holdfast programs list",
            "holdfast programs show hf-megatron",
            "holdfast programs check mine.toml --checkpoint llama3-8b@500",
            attribute="app",
        ),
        "token": _entry(
            "access.token",
            "Create, rotate, list and revoke tokens.",
            "holdfast token create ci --scope write --runs 'team-a-*' --expires 30d",
            "holdfast token ls",
            "holdfast token rotate ci --grace 1d",
            "holdfast token revoke ci",
            attribute="app",
        ),
        "whoami": _entry("access.whoami", "Show your user name in the service, and your permissions.", "holdfast whoami"),
        "audit": _entry(
            "access.audit",
            "Show the audit log, newest first. It contains every change and every refused request.",
            "holdfast audit --who alice --since 3d",
            "holdfast audit --refused --csv",
        ),
        "quota": _entry(
            "access.quota",
            "Show and set quotas of teams. A quota limits the total bytes of all runs that match a pattern.",
            "holdfast quota ls",
            "holdfast quota set 'team-a-*' 20TB",
            "holdfast quota rm 'team-a-*'",
            attribute="app",
        ),
        "demo": _entry(
            "demo",
            "Train a small Llama, kill it, resume it, compare. Two ranks are compared bit by bit with an uninterrupted run.",
            "holdfast demo --directory demo-output",
        ),
        "help": _entry(
            "help",
            "Show the help of a command, or what the exit statuses mean.",
            "holdfast help token create",
            "holdfast help exit",
        ),
    },
}


class Commands(LazyGroup):
    """All commands, in the groups and the order in which they are listed."""

    groups: ClassVar = _GROUPS


app = typer.Typer(
    name="holdfast",
    cls=Commands,
    help="Checkpoints for model training: saved without stalling, verified by digests, restored to any parallel layout.",
    epilog="`holdfast help COMMAND` shows the help of a command, `holdfast help exit` the exit statuses.",
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
