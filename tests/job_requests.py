"""Requests of jobs, as tests write them: arguments have the names that they have in JSON."""

from __future__ import annotations

from typing import Any

from holdfast_formats.rest.jobs import ConvertArguments, ExportJob, ImportJob, MergeJob, parse

SOURCE = "a directory"  # what a test hands over as an object needs no name


def request(kind: str, run: str | None = None, step: int | None = None, /, **arguments: Any) -> Any:
    return parse({"kind": kind, "run": run, "step": step, "arguments": arguments})


def an_import(run: str, step: int, /, **arguments: Any) -> ImportJob:
    made: ImportJob = request("import", run, step, **{"from": SOURCE, **arguments})
    return made


def a_merge(run: str, step: int, recipe: str = SOURCE, /, **arguments: Any) -> MergeJob:
    made: MergeJob = request("merge", run, step, recipe=recipe, **arguments)
    return made


def an_export(run: str, step: int, to: str, /, **arguments: Any) -> ExportJob:
    made: ExportJob = request("export", run, step, to=to, **arguments)
    return made


def a_conversion(**arguments: Any) -> ConvertArguments:
    return ConvertArguments(**{"source": SOURCE, "to": SOURCE, **arguments})
