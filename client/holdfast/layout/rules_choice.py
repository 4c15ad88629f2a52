"""Chooses rules and layout from the caller's text, mapping, TOML file or config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.read.reader import CheckpointReader
from holdfast_formats.errors import CorruptManifest, InvalidRequest, LimitExceeded
from holdfast_formats.layout import language, rules
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.rules import Rules
from holdfast_formats.programs import Program, load, read_program
from holdfast_formats.region import Shape

PROGRAM_BYTES_MAX = 60_000

ProgramSource = Program | Path | str | None  # a str: a program's text, a .toml file's path, a shipped one's name


def program_of(source: ProgramSource) -> Program | None:
    """The program; `InvalidRequest` for an unreadable or invalid one, `LimitExceeded` for a file that is too long."""
    if source is None or isinstance(source, Program):
        return source
    if isinstance(source, Path):
        return read_program(_read(source))
    if not isinstance(source, str):
        raise InvalidRequest(
            f"a program must be a file, its text, or the name of a built-in one, not {type(source).__name__}",
            hint="`holdfast programs list` shows the built-in ones",
        )
    if "\n" in source or "=" in source:
        return read_program(source)
    return read_program(_read(Path(source))) if source.endswith(".toml") else load(source)


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            encoded = file.read(PROGRAM_BYTES_MAX + 1)
        text = encoded.decode()
    except OSError as error:
        raise InvalidRequest(
            f"cannot read the program {path}: {error.strerror}",
            hint="check the path; `holdfast programs list` shows the built-in ones",
        ) from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not UTF-8: {error}", hint="save the program as UTF-8 text") from error
    if len(encoded) > PROGRAM_BYTES_MAX:
        raise LimitExceeded(f"{path} has more than {PROGRAM_BYTES_MAX} bytes", hint="use patterns instead of single names")
    return text


CONFIG = "config.json"
RULES_BYTES_MAX = 2**20  # a table has its own, lower limit; this one keeps a wrong file out of memory

RulesSource = str | Path | Mapping[str, Any] | None  # a TOML file, its text, or the decoded tables
LayoutSource = Layout | str | Mapping[str, Any]


class ParallelLayout(NamedTuple):
    """How ranks hold plain tensors, with what `Checkpointer(layout=…)` needs to know of the model.

    Attributes:
        layout: The layout, as text such as `"tp=4,pp=2"`.
        rules: Extends the tables of architectures: a TOML file, or its contents.
        config: The model's config.json, if it is not among the assets.
        program: A mapping program: the tensors are those that it makes of the stored ones. Restores go through it, and
            saves go back. "auto" chooses a built-in one when it restores a checkpoint with other names.

    Example:
        >>> Checkpointer("llama3-8b", state, layout=ParallelLayout("tp=4,pp=2", config=model.config.to_dict()))
    """

    layout: LayoutSource
    rules: RulesSource = None
    config: Mapping[str, Any] | None = None
    program: ProgramSource = None


def layout_of(layout: LayoutSource) -> Layout:
    """The layout; `InvalidRequest` for anything that is not one."""
    return layout if isinstance(layout, Layout) else language.parse(layout)


def choose(
    config: Mapping[str, Any] | None,
    names: Iterable[str],
    layout: Layout,
    extra: Mapping[str, Any] | None,
    shapes: Mapping[str, Shape] | None = None,
) -> Rules:
    """The rules for a model: the table named by the layout or implied by its config, or the team's own."""
    return rules.choose(config, names, table=layout.rules, extra=extra, shapes=shapes)


def read_rules(source: RulesSource) -> Mapping[str, Any] | None:
    """Read a team's own rules as plain values; `InvalidRequest` with the file's name if it cannot be read or is not TOML."""
    if source is None or isinstance(source, Mapping):
        return source
    try:
        with open(source, "rb") as file:
            text = file.read(RULES_BYTES_MAX)
    except OSError as error:
        raise InvalidRequest(f"cannot read the rules file {source}: {error.strerror}", hint="check the path") from error
    return rules.decode(text)


def config_of(reader: CheckpointReader) -> Mapping[str, Any] | None:
    """The checkpoint's config.json, None if it has none; `CorruptManifest` if it is not a JSON object."""
    if reader.manifest.file(CONFIG) is None:
        return None
    return parse_config(reader.read_file(CONFIG), reader.source.label)


def parse_config(encoded: bytes, label: str) -> Mapping[str, Any]:
    """Parse a config.json; `CorruptManifest` with its source if it is not a JSON object."""
    try:
        document = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise CorruptManifest(
            f"{label}: {CONFIG} is not JSON: {error}",
            hint="give a later step a valid one: save(step, assets=…)",
            file=CONFIG,
        ) from error
    if not isinstance(document, dict):
        raise CorruptManifest(
            f"{label}: {CONFIG} is not a JSON object",
            hint="give a later step a valid one: save(step, assets=…)",
            file=CONFIG,
        )
    return document
