"""The `holdfast` command: name, help and subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from .commands import (
    bench,
    catalog,
    demo,
    diff,
    doctor,
    export,
    import_,
    jobs,
    keep,
    ls,
    marks,
    nodes,
    programs,
    repair,
    restore,
    serve,
    show,
    stats,
    token,
    top,
    verify,
    wait,
    watch,
)

EXIT_STATUSES = (
    "Exit status: 0 done · 1 something needs to be fixed (doctor), or another error · 2 the request is wrong · "
    "3 not found · 4 conflict with the current state · 5 damaged: do not trust these bytes · 6 unavailable: "
    "try again later · 7 denied: another token is needed."
)

app = typer.Typer(
    name="holdfast",
    help="Checkpoints for model training: saved without stalling, verified by digests, restored to any parallel layout.",
    epilog=EXIT_STATUSES,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # they could show secrets
    context_settings={"help_option_names": ["-h", "--help"]},
)
# serve hands its flags on as they are: the daemon's own parser is the one place that knows them.
_AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command("serve", add_help_option=False, context_settings=_AS_GIVEN)(serve.serve)
_KEEPING = (keep.keep, marks.pin, marks.unpin, marks.label, marks.rm)
for _command in (
    ls.ls,
    show.show,
    stats.stats,
    verify.verify,
    repair.repair,
    diff.diff,
    restore.restore,
    export.export,
    *_KEEPING,
    serve.open,
    top.top,
    nodes.nodes,
    watch.watch,
    wait.wait,
    doctor.doctor,
    bench.bench,
    demo.demo,
):
    app.command(epilog=EXIT_STATUSES)(_command)
app.add_typer(jobs.app, name="jobs", epilog=EXIT_STATUSES)
app.add_typer(token.app, name="token", epilog=EXIT_STATUSES)
app.add_typer(programs.app, name="programs", epilog=EXIT_STATUSES)

app.add_typer(catalog.app, name="catalog", epilog=EXIT_STATUSES)
app.command("import", epilog=EXIT_STATUSES)(import_.import_)
app.command(epilog=EXIT_STATUSES)(import_.merge)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from . import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    """The entry point of the `holdfast` script."""
    app()
