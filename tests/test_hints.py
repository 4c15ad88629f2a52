"""Every refusal of an import, export, merge or restore, of programs, layouts and rules is a way out: it has a hint, and
what the hint names exists.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

import holdfast
from holdfast.cli import Commands, app
from holdfast_formats.errors import LEAVES
from holdfast_formats.layout.language import KEYS, OPTIONS
from holdfast_formats.programs.statements import ATTRIBUTES
from tests.structure import TOP

CONVERT, MERGE = "service/holdfast_service/wings/convert", "service/holdfast_service/wings/merge"
CLIENT = tuple(f"client/holdfast/{folder}" for folder in ("layout", "read", "restore", "state", "tensors"))
FORMATS = tuple(f"formats/holdfast_formats/{folder}" for folder in ("layout", "mapping", "programs"))
# The commands whose options a folder's texts name, unless a text names another command before the option.
COMMANDS = {
    f"{CONVERT}/exports/": {"export"},
    f"{CONVERT}/foreign/dcp/export": {"export"},
    f"{CONVERT}/foreign/pickle_writer.py": {"export"},
    f"{CONVERT}/foreign/torch_zips.py": {"export"},
    f"{CONVERT}/foreign/": {"import"},
    CONVERT: {"import", "export", "convert"},
    MERGE: {"merge"},
    **{folder: set() for folder in (*CLIENT, *FORMATS)},
    "client/holdfast/read": {"show"},
}
OTHERS_OPTIONS = {
    "--ckpt-format": "Megatron-LM",
    "--ckpt-convert-format": "Megatron-LM",
    "--export-root": "holdfast serve",
    "--input_folder": "DeepSpeed's ds_to_universal",
    "--target_pipeline_model_parallel_size": "NeMo's megatron_change_num_partitions",
    "--target_tensor_model_parallel_size": "the same",
}
# The readers: `ForeignKind.read` gives their errors a hint, as tests/wings/convert/foreign/test_kinds.py holds it to. These
# modules of theirs also run elsewhere, and these classes while tensors are read.
READERS = f"{CONVERT}/foreign/"
NOT_ONLY_READERS = {"export", "export_names", "json_values", "kinds", "leaving_out", "pickle_writer", "torch_zips"}
CAUGHT = {
    (f"{CONVERT}/exports/deepspeed_progress.py", "stored"): "becomes an entry of what the export leaves out",
    ("client/holdfast/read/held_slots.py", "HeldSlot"): "the restore reads the files in place of the slot",
    ("client/holdfast/read/memory_load.py", "HeldSlotsSource"): "the same",
    ("formats/holdfast_formats/mapping/box_moves.py", "check"): "a plan of ours that is wrong, before it writes",
    ("formats/holdfast_formats/mapping/target_files.py", "check"): "the same",
}
OURS = {
    "Checkpointer": holdfast.Checkpointer,
    "Fragment": holdfast.Fragment,
    "Named": holdfast.Named,
    "OptimizerShards": holdfast.OptimizerShards,
    "ParallelLayout": holdfast.ParallelLayout,
    "register_class": holdfast.register_class,
    "save": holdfast.Checkpointer.save,
    "restore": holdfast.Checkpointer.restore,
}
OTHERS_KEYWORDS = {
    "dp": "a layout's text",
    "dtype": "torch.empty",
    "edp": "a layout's mesh",
    "key": "a layout's text",
    "legacy": "numpy's get_state",
    "num_workers": "torch's DataLoader",
    "persistent": "register_buffer",
    "quantization_config": "from_pretrained of transformers",
    "shuffle": "torch's DataLoader",
    "use_collectives": "torch's DCP",
    "use_orig_params": "torch's FSDP",
    "weights_only": "torch.load",
}
_ERRORS = {leaf.__name__ for leaf in LEAVES}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
_COMMAND = re.compile(r"holdfast ([a-z]+)\b(?! of| that| knows)")
_CALL = re.compile(rf"(?<![\w.])(?:holdfast\.)?({'|'.join(OURS)})\((\w+)=(?!=)")
_KEYWORD = re.compile(r"(?<![\w.'\"])([a-z]\w+)=(?![=\d.])")
_DOTTED = re.compile(r"\bholdfast((?:\.[A-Za-z_]\w*)+)")
_PAGE = re.compile(r"\b(docs/[\w./-]+\.md)(?:#([\w-]+))?")


class Source(NamedTuple):
    """A module: its path below the top, and its tree."""

    path: str
    tree: ast.Module

    @property
    def commands(self) -> set[str]:
        return next(commands for folder, commands in COMMANDS.items() if self.path.startswith(folder))


@cache
def sources() -> tuple[Source, ...]:
    folders = (CONVERT, MERGE, *CLIENT, *FORMATS)
    paths = sorted(path for folder in folders for path in (TOP / folder).rglob("*.py"))
    return tuple(Source(str(path.relative_to(TOP)), ast.parse(path.read_text())) for path in paths)


def within(tree: ast.AST, inside: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Every node, with the classes and functions around it."""
    for child in ast.iter_child_nodes(tree):
        yield child, inside
        yield from within(child, (*inside, child) if isinstance(child, (ast.ClassDef, *_FUNCTIONS)) else inside)


def decodes(inside: tuple[ast.AST, ...]) -> bool:
    """Whether code runs while tensors are read: in a class with a method `decode`."""
    classes = [one for one in inside if isinstance(one, ast.ClassDef)]
    return any(isinstance(one, _FUNCTIONS) and one.name == "decode" for held in classes for one in held.body)


def has_hint(call: ast.Call) -> bool:
    given = [one.value for one in call.keywords if one.arg in ("hint", None)]
    return any(not isinstance(value, ast.Constant) or bool(value.value) for value in given)


def covered(source: Source, inside: tuple[ast.AST, ...]) -> bool:
    """Whether the hint is given elsewhere."""
    names = {one.name for one in inside if isinstance(one, (ast.ClassDef, *_FUNCTIONS))}
    if any((source.path, name) in CAUGHT for name in names):
        return True
    return source.path.startswith(READERS) and Path(source.path).stem not in NOT_ONLY_READERS and not decodes(inside)


def bare(source: Source) -> list[str]:
    """Errors without a hint, and functions that make a hint of their callers' optional."""
    found = []
    for node, inside in within(source.tree):
        if isinstance(node, ast.Call) and not covered(source, inside):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _ERRORS and not has_hint(node):
                found.append(f"{source.path}:{node.lineno}: {name} without a hint")
        if isinstance(node, _FUNCTIONS) and not covered(source, inside):
            named = [*node.args.posonlyargs, *node.args.args]
            given = dict(zip(reversed([one.arg for one in named]), reversed(node.args.defaults), strict=False))
            given |= {
                one.arg: value for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value
            }
            default = given.get("hint")
            if isinstance(default, ast.Constant) and not default.value:
                found.append(f"{source.path}:{node.lineno}: {node.name}() without a hint of its own")
    return found


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a module but its docstrings; `…` stands for what an f-string computes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield from texts(node)


@cache
def options(command: str) -> frozenset[str]:
    loaded: Any = get_command(app).load(command)  # type: ignore[attr-defined]
    return frozenset(option for one in loaded.params for option in one.opts)


def unknown_options(text: str, commands: set[str]) -> list[str]:
    """Options that the command they are for does not have."""
    unknown = []
    for found in _OPTION.finditer(text):
        named = _COMMAND.findall(text[: found.start()])[-1:]
        if named and named[0] != "serve":
            known = options(named[0])
        else:
            known = frozenset(option for command in commands for option in options(command))
        if found[0] not in known and found[0] not in OTHERS_OPTIONS:
            unknown.append(found[0])
    return unknown


def parameters(call: str) -> frozenset[str]:
    return frozenset(inspect.signature(OURS[call]).parameters)


def unknown_code(text: str) -> list[str]:
    """Names of Holdfast, and parameters, that do not exist."""
    unknown = [f"{call}({name}=)" for call, name in _CALL.findall(text) if name not in parameters(call)]
    every = {name for call in OURS for name in parameters(call)} | {*OTHERS_KEYWORDS, *ATTRIBUTES, *KEYS, *OPTIONS}
    unknown += [f"{name}=" for name in _KEYWORD.findall(text) if name not in every]
    return unknown + [f"holdfast{path}" for path in _DOTTED.findall(text) if not exists(path)]


def exists(path: str) -> bool:
    """Whether `import holdfast.a.b` or an attribute of it has this path."""
    module, _, name = f"holdfast{path}".rpartition(".")
    try:
        return hasattr(__import__(module, fromlist=[name]), name)
    except ImportError:
        return False


def unknown_pages(text: str) -> list[str]:
    unknown = []
    for path, anchor in _PAGE.findall(text):
        page = TOP / path
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE) if page.is_file() else None
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings or ()}
        if headings is None or (anchor and anchor not in slugs):
            unknown.append(f"{path}#{anchor}" if anchor else path)
    return unknown


def test_every_refusal_has_a_hint() -> None:
    """Its own, or that of the one place that every reader's error passes."""
    assert [line for source in sources() for line in bare(source)] == []


def test_options_and_commands_exist() -> None:
    """Each option in the command that the text is for."""
    commands = {name for entries in Commands.groups.values() for name in entries}
    unknown = []
    for source in sources():
        for text in texts(source.tree):
            unknown += [(source.path, one) for one in unknown_options(text, source.commands)]
            unknown += [(source.path, one) for one in re.findall(r"`holdfast ([a-z]+)", text) if one not in commands]
    assert unknown == []


def test_code_and_pages_exist() -> None:
    """Functions and parameters of Holdfast, and pages of the documentation with their headings."""
    found = [
        (source.path, one)
        for source in sources()
        for text in texts(source.tree)
        for one in (*unknown_code(text), *unknown_pages(text))
    ]
    assert found == []


def test_lists_of_exceptions_are_needed() -> None:
    """A name that no text has any more leaves its list."""
    every = [text for source in sources() for text in texts(source.tree)]
    named = {option for text in every for option in _OPTION.findall(text)}
    assert OTHERS_OPTIONS.keys() <= named
    keywords = {name for text in every for name in _KEYWORD.findall(text)}
    assert OTHERS_KEYWORDS.keys() <= keywords
    stems = {Path(source.path).stem for source in sources() if source.path.startswith(READERS)}
    assert stems >= NOT_ONLY_READERS
    functions = {
        (source.path, node.name)
        for source in sources()
        for node, _ in within(source.tree)
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS))
    }
    assert CAUGHT.keys() <= functions


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ('raise InvalidRequest("no")', 1),
        ('raise InvalidRequest("no", hint="")', 1),
        ('raise InvalidRequest("no", hint="leave it out")', 0),
        ('def refuse(what: str, hint: str = ""): ...', 1),
        ('def refuse(what: str, *, hint: str = ""): ...', 1),
        ("def refuse(what: str, hint: str): ...", 0),
    ],
)
def test_what_is_a_refusal_without_a_hint(code: str, lines: int) -> None:
    """Also an error that a function raises for others, whose hint they may leave out."""
    assert len(bare(Source(f"{MERGE}/recipe.py", ast.parse(code)))) == lines
    assert bare(Source(f"{READERS}flat.py", ast.parse(code))) == []
    inside = "class Decoder:\n    def decode(self): ...\n    def read(self):\n        " + code
    assert len(bare(Source(f"{READERS}flat.py", ast.parse(inside)))) == lines


def test_what_is_unknown() -> None:
    """An option of another command, a parameter of another function, a page and a heading that are gone."""
    assert unknown_options("leave --as out, or use --leave-out x", {"import"}) == ["--as"]
    assert unknown_options("first `holdfast export --as hf`", {"merge"}) == []
    assert unknown_code("restore(exclude=('a',)) or save(keep=…) or elsewhere=3x") == ["save(keep=)"]
    assert unknown_code("pass surely=…; holdfast.register_class(x); holdfast.register(x)") == [
        "surely=",
        "holdfast.register",
    ]
    assert unknown_pages("docs/merging.md, docs/gone.md, docs/merging.md#gone") == ["docs/gone.md", "docs/merging.md#gone"]
