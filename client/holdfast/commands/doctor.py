"""`holdfast doctor`: check that this machine is ready."""

from __future__ import annotations

import typer
from rich.text import Text

from holdfast.terminal import console
from holdfast.terminal.doctor import examine
from holdfast.terminal.options import AnyRoot, AsJson, Url

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(root: AnyRoot = None, url: Url = None, as_json: AsJson = False) -> None:
    """Check this machine: software, memory, storage, daemon. Exit status 1 if something needs to be fixed.

    In a bucket, a few bytes are written below the prefix, and removed.
    """
    with console.reporting(as_json):
        findings = examine(root, url)
    if as_json:
        console.print_json([finding._asdict() for finding in findings])
    else:
        table = console.table("STATUS", "CHECK", "FOUND", "ADVICE", wrap=("FOUND", "ADVICE"))
        for finding in findings:
            mark = Text(finding.status, _STYLES[finding.status])
            table.add_row(mark, finding.name, Text(finding.what), Text(finding.advice))
        console.out().print(table)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)
