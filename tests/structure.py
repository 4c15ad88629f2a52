"""The shape of the product, which `make check` prints and holds to its limits.

Rooms of a size that one can look at, one meaning a class name, no parameter or call that hides what it is made of, and for
every module a test file that is known to be its own.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast import _HOME

TOP = Path(__file__).parents[1]
PACKAGES = ("client/holdfast", "formats/holdfast_files", "formats/holdfast_formats", "service/holdfast_service")
MODULES_MAX = 25  # of a folder
FUNCTION_LINES_MAX = 60  # without the docstring
FUNCTION_LINES_P95_MAX = 25
FILE_CODE_MAX = 400  # lines with code: no blank lines, comments or docstrings
CLASS_CODE_MAX = 250

# Files and classes with more code, and why. A class is cut into two that are whole when they are constructed, or not at all.
LARGE = {
    "service/holdfast_service/storage/posix.py": "the only module that renames and fsyncs",
}

# Where the tests of a folder's modules stand, below it in the same folders; the first that fits counts.
MIRRORS = {
    "client/holdfast/demo": "tests/demo",
    "client/holdfast": "tests/client",
    "formats/holdfast_files": "tests/files",
    "formats/holdfast_formats": "tests/formats",
    "service/holdfast_service": "tests",
}
# Modules without a test file of their name, and the test file of each; a folder stands for all such modules in it.
ELSEWHERE = TOP / "tests" / "elsewhere.toml"

# Parameters that are tuples of unlike things, by file and function, and why they stay so.
TUPLES = {("service/holdfast_service/__main__.py", "_bind"): "an address as the socket module has it"}
_IMPORT = re.compile(r"^ *(?:from (\.*)([\w.]*) )?import (\([^)]*\)|.+)", re.MULTILINE)
_STARTED = re.compile(r'"(holdfast_service|holdfast\.demo)"')  # programs that tests start
_LISTED = re.compile(r'_entry\(\s*"([\w.]+)"')  # commands, which are imported by their names
ENVIRONMENT = {f"os.{name}" for name in ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")}
# What has a kind of storage in its name, and what opens one: who asks either cannot work on another kind.
STORAGE = "service/holdfast_service/storage/"
STORAGE_KINDS = frozenset({"MemoryTier", "ObjectRecords", "ObjectStore", "PosixStore", "PosixTier"})
STORAGE_OPENERS = frozenset({"stored_in", "tier_at"})
OPENING = tuple(
    f"service/holdfast_service/{folder}/" for folder in ("offline", "wings/convert", "wiring")
)  # exports' directories
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """A module: its path below the project, and what it says."""

    path: str
    tree: ast.Module
    lines: int
    code: frozenset[int]  # the numbers of its lines with code

    def functions(self) -> Iterator[FunctionNode]:
        return (node for node in ast.walk(self.tree) if isinstance(node, FunctionNode))


def parsed(path: str, text: str) -> Source:
    """The module of this text, at this path."""
    tree, lines = ast.parse(text), text.splitlines()
    code = {number for number, line in enumerate(lines, 1) if line.lstrip()[:1] not in ("", "#")}
    docstrings = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr):  # which may have empty lines, and such as begin with #
            code.update(_range(node))
        elif isinstance(node, ast.Module | ast.ClassDef | FunctionNode) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(_range(node.body[0]))
    return Source(path, tree, len(lines), frozenset(code - docstrings))


def _range(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def sources() -> list[Source]:
    """Every module of the product."""
    found = []
    for package in PACKAGES:
        for path in sorted((TOP / package).rglob("*.py")):
            found.append(parsed(str(path.relative_to(TOP)), path.read_text()))
    return found


def full_folders(modules: list[Source]) -> list[str]:
    """Folders with more modules than one looks through."""
    counts = Counter(str(Path(one.path).parent) for one in modules)
    return [f"{folder} has {count} modules" for folder, count in sorted(counts.items()) if count > MODULES_MAX]


def homonyms(modules: list[Source]) -> list[str]:
    """Public class names that stand for two things; a protocol and what implements it are one."""
    found: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for one in modules:
        for node in ast.walk(one.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append((one.path, _is_protocol(node)))
    return [
        f"class {name} stands in {', '.join(path for path, _ in places)}"
        for name, places in sorted(found.items())
        if len(places) > 1 and sum(not protocol for _, protocol in places) > 1
    ]


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)


def tuple_parameters(modules: list[Source]) -> list[str]:
    """Parameters that are tuples of unlike things, and not among those that have a reason."""
    found = []
    for one in modules:
        for function in one.functions():
            given = function.args
            for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                if _is_mixed_tuple(parameter.annotation) and (one.path, function.name) not in TUPLES:
                    found.append(f"{one.path}:{function.lineno}: {function.name}({ast.unparse(parameter)})")
    return found


def _is_mixed_tuple(annotation: ast.expr | None) -> bool:
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "tuple":
        return False
    parts = [ast.unparse(part) for part in annotation.slice.elts] if isinstance(annotation.slice, ast.Tuple) else []
    return "..." not in parts and len(set(parts)) > 1


def hidden_keywords(modules: list[Source]) -> list[str]:
    """Calls with `**values` of a dictionary that the same function writes down: it hides what is given, from mypy too."""
    found = []
    for one in modules:
        for function in one.functions():
            written = {
                target.id
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                for keyword in call.keywords:
                    if keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id in written:
                        found.append(f"{one.path}:{call.lineno}: **{keyword.value.id}")
    return found


def long_functions(modules: list[Source]) -> list[str]:
    """Functions that nobody sees at one glance."""
    return [
        f"{one.path}:{function.lineno}: {function.name} has {_lines(function)} lines"
        for one in modules
        for function in one.functions()
        if _lines(function) > FUNCTION_LINES_MAX
    ]


def large(modules: list[Source]) -> list[str]:
    """Files and classes with more code than one reads at once, and not among those that have a reason."""
    found = []
    for one in modules:
        if len(one.code) > FILE_CODE_MAX and one.path not in LARGE:
            found.append(f"{one.path} has {len(one.code)} lines of code")
        for node in ast.walk(one.tree):
            if isinstance(node, ast.ClassDef) and f"{one.path}:{node.name}" not in LARGE:
                count = len(one.code.intersection(_range(node)))
                if count > CLASS_CODE_MAX:
                    found.append(f"{one.path}:{node.lineno}: class {node.name} has {count} lines of code")
    return found


def environment_readers(modules: list[Source]) -> list[str]:
    """Where the environment is read, or changed, by another module than a `config`: settings would be found nowhere."""
    return [
        f"{one.path}:{node.lineno}: {ast.unparse(node)}, and only config.py reads the environment"
        for one in modules
        for node in ast.walk(one.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ENVIRONMENT and Path(one.path).name != "config.py"
    ]


def storage_kinds(modules: list[Source]) -> list[str]:
    """Imports of one kind of storage outside of `storage/`, and of what opens a directory outside of what wires."""
    found = []
    for one in modules:
        if one.path.startswith(STORAGE):
            continue
        unwanted = STORAGE_KINDS if one.path.startswith(OPENING) else STORAGE_KINDS | STORAGE_OPENERS
        for node in ast.walk(one.tree):
            if isinstance(node, ast.ImportFrom):
                found += [
                    f"{one.path}:{node.lineno}: imports {name.name}; take a RootStorage, Store or Records"
                    for name in node.names
                    if name.name in unwanted
                ]
    return found


def homeless(modules: list[Source], elsewhere: dict[str, list[str]]) -> list[str]:
    """Modules that do something, and of which no test file has the name or says that it tests them."""
    listed = {place for places in elsewhere.values() for place in places}
    return [
        f"{one.path} has neither {own_test(one.path)} nor a line in {ELSEWHERE.name}"
        for one in modules
        if _does_something(one)
        and not (TOP / own_test(one.path)).exists()
        and not any(place in listed for place in (one.path, *(f"{parent}/" for parent in Path(one.path).parents)))
    ]


def own_test(path: str) -> str:
    """The test file of a module's name."""
    place = next(place for place in MIRRORS if path.startswith(f"{place}/"))
    module = Path(path).relative_to(place)
    return f"{MIRRORS[place]}/{module.parent.as_posix()}/test_{module.stem.strip('_')}.py".replace("/./", "/")


def _does_something(one: Source) -> bool:
    """Whether there is a function with a body: not in a package's own file, a protocol or a page of constants."""
    functions = (function for function in one.functions() if not isinstance(function.body[-1], ast.Expr | ast.Pass))
    return Path(one.path).name != "__init__.py" and next(functions, None) is not None


def wrong_homes(modules: list[Source], elsewhere: dict[str, list[str]]) -> list[str]:
    """Lines of the list that are not true: files that are not there, or do not import what they are said to test."""
    found = []
    paths = {one.path for one in modules}
    for test, places in elsewhere.items():
        if not (TOP / test).is_file():
            found.append(f"{ELSEWHERE.name}: {test} is not there")
            continue
        imported = reached(test, paths)
        for place in places:
            inside = [path for path in paths if path == place or (place.endswith("/") and path.startswith(place))]
            tested = [path for path in inside if not (TOP / own_test(path)).exists()]
            if not tested:
                found.append(f"{ELSEWHERE.name}: {place} is not there, or has its own tests")
            if not place.endswith("/") and place not in imported:
                found.append(f"{ELSEWHERE.name}: {test} does not import {place}")
            if place.endswith("/") and not imported & set(inside):
                found.append(f"{ELSEWHERE.name}: {test} imports nothing of {place}")
    return found


def reached(test: str, paths: set[str]) -> set[str]:
    """The modules that a test file imports, or what it imports, and so on."""
    seen: set[str] = set()
    due = [test]
    while due:
        path = due.pop()
        if path not in seen:
            seen.add(path)
            due += [other for other in _imports(path) if other in paths or other.startswith("tests/")]
    return seen


@cache
def _imports(path: str) -> list[str]:
    """The files of a file's imports, wherever in it they stand, and of the programs and commands that it starts."""
    folders = list(Path(path).parent.parts)
    here = folders if path.startswith("tests/") else folders[1:]
    text = (TOP / path).read_text()
    found = []
    for dots, module, names in _IMPORT.findall(text):
        whence = ".".join((*(here[: len(here) + 1 - len(dots)] if dots else ()), *([module] if module else ())))
        words = re.findall(r"\w+", names)
        found += [whence, *(f"{whence}.{_HOME.get(word, word) if whence == 'holdfast' else word}" for word in words)]
    found += [f"{package}.__main__" for package in _STARTED.findall(text)]
    found += [f"holdfast.commands.{module}" for module in _LISTED.findall(text)]
    return [file for name in found for file in _files(name)]


@cache
def _files(name: str) -> list[str]:
    """The file of a module by its dotted name, if it is one of ours."""
    tops = ("", *(f"{Path(package).parent}/" for package in PACKAGES))
    return [path for top in tops if (TOP / (path := f"{top}{name.replace('.', '/')}.py")).is_file()]


def _lines(function: FunctionNode) -> int:
    """Of a function, without its docstring: a reference with all arguments makes nothing harder to follow."""
    first = function.body[0]
    described = range(first.lineno, (first.end_lineno or first.lineno) + 1) if ast.get_docstring(function) else ()
    return (function.end_lineno or function.lineno) - function.lineno + 1 - len(described)


def _p95(values: list[int]) -> int:
    return sorted(values)[int(0.95 * len(values))]


def main() -> int:
    """Print the shape; 1 where it is over its limits."""
    modules = sources()
    lengths = [_lines(function) for one in modules for function in one.functions()]
    files = [one.lines for one in modules]
    print(f"{sum(len(one.code) for one in modules)} lines of code")
    print(f"{len(lengths)} functions: median {statistics.median(lengths):.0f} lines, p95 {_p95(lengths)}, {max(lengths)}")
    print(f"{len(files)} files: median {statistics.median(files):.0f} lines, p95 {_p95(files)}, {max(files)}")
    checks = (
        full_folders,
        homonyms,
        tuple_parameters,
        hidden_keywords,
        long_functions,
        large,
        environment_readers,
        storage_kinds,
    )
    elsewhere = msgspec.toml.decode(ELSEWHERE.read_bytes(), type=dict[str, list[str]])
    problems = [problem for check in checks for problem in check(modules)]
    problems += homeless(modules, elsewhere) + wrong_homes(modules, elsewhere)
    if _p95(lengths) > FUNCTION_LINES_P95_MAX:
        problems.append(f"a function in twenty has more than {FUNCTION_LINES_P95_MAX} lines")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
