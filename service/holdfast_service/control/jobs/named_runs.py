"""Runs that a job names besides its own: a caller that may not read them all does not see the job."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from holdfast_formats import naming
from holdfast_formats.rest.operations import Job

UNKNOWN = ""  # no run's name: visible only to callers that see all runs
_CHECKPOINT = re.compile(r"([^\s@+:,'\"{}\[\]]+)@[0-9]+")


def other_runs(job: Job) -> frozenset[str]:
    """The run that a job compares its own with, and those of the models in a recipe; `UNKNOWN` for an unreadable recipe."""
    named = str(job.arguments.get("with", "")).rpartition("@")[0]
    runs = {named} if named else set()
    if job.kind == "merge":
        runs |= _of_recipe(str(job.arguments.get("recipe", "")))
    return frozenset(runs - {job.run})


def _of_recipe(text: str) -> set[str]:
    """From all values, whatever they mean, and comments too."""
    names = {match[1] for match in _CHECKPOINT.finditer(text)}
    try:
        values = list(_scalars(yaml.compose(text, yaml.SafeLoader)))
    except (yaml.YAMLError, RecursionError, ValueError):
        return {UNKNOWN}
    names |= {match[1] for value in values for match in _CHECKPOINT.finditer(value)}
    return {name if naming.is_run_name(name) else UNKNOWN for name in names}


def _scalars(node: yaml.Node | None) -> Iterator[str]:
    if isinstance(node, yaml.ScalarNode):
        yield str(node.value)
    elif isinstance(node, yaml.SequenceNode):
        for one in node.value:
            yield from _scalars(one)
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for one in pair:
                yield from _scalars(one)
