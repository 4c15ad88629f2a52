"""The shape of the product is looked at: every rule finds what breaks it, and the product breaks none."""

from __future__ import annotations

import pytest

from tests import structure
from tests.structure import Source


def source(path: str, text: str) -> Source:
    return structure.parsed(path, text)


@pytest.fixture(scope="module")
def modules() -> list[Source]:
    """Those of the product."""
    return structure.sources()


def test_a_full_folder_is_named() -> None:
    """A package's own file counts, as it is read as well."""
    names = ["__init__", *(f"m{i}" for i in range(structure.MODULES_MAX))]
    modules = [source(f"client/holdfast/room/{name}.py", "") for name in names]
    assert structure.full_folders(modules) == ["client/holdfast/room has 26 modules"]
    assert structure.full_folders(modules[1:]) == []


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("class Part: ...", "class Part: ...", ["class Part stands in a.py, b.py"]),
        ("class Part(Protocol): ...", "class Part: ...", []),
        ("class Part: ...", "class Piece: ...", []),
        ("class _Part: ...", "class _Part: ...", []),
    ],
)
def test_a_class_name_for_two_things_is_named(first: str, second: str, found: list[str]) -> None:
    """A protocol and what implements it are one thing, and a private name is nobody else's."""
    assert structure.homonyms([source("a.py", first), source("b.py", second)]) == found


def test_a_file_and_a_class_with_much_code_are_named() -> None:
    """Comments, blank lines and docstrings do not count."""
    body = '    """Text."""\n' + "    # why\n\n    x = 1\n" * (structure.CLASS_CODE_MAX - 1)
    small, large = source("a.py", f"class A:\n{body}"), source("b.py", f"class B:\n{body}    y = 1\n")
    assert structure.large([small, large]) == ["b.py:1: class B has 251 lines of code"]
    assert structure.large([source("c.py", "x = 1\n" * 401)]) == ["c.py has 401 lines of code"]
    assert structure.large([source("service/holdfast_service/storage/posix.py", "x = 1\n" * 401)]) == []


@pytest.mark.parametrize("name", ["environ", "getenv"])
def test_who_reads_the_environment_is_named(name: str) -> None:
    """Except for the module of settings, in each package."""
    text = f"import os\nwho = os.{name}['WHO']"
    (found,) = structure.environment_readers([source("a/b.py", text), source("a/config.py", text)])
    assert found.startswith(f"a/b.py:2: os.{name},")


@pytest.mark.parametrize(
    ("place", "name", "named"),
    [
        ("control/a.py", "PosixStore", True),
        ("daemon/copying/a.py", "stored_in", True),
        ("wiring/a.py", "PosixTier", True),
        ("wiring/a.py", "stored_in", False),
        ("control/a.py", "Store", False),
        ("storage/a.py", "PosixStore", False),
    ],
)
def test_who_names_a_kind_of_storage_is_named(place: str, name: str, named: bool) -> None:
    """In a list of imports as well; what wires may open a directory."""
    text = f"from holdfast_service.storage import Files, {name}"
    found = structure.storage_kinds([source(f"service/holdfast_service/{place}", text)])
    assert [one.partition(";")[0] for one in found] == [f"service/holdfast_service/{place}:1: imports {name}"] * named


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(which: tuple[str, int]) -> None: ...", ["a.py:1: f(which: tuple[str, int])"]),
        ("def f(*, which: tuple[str, int] = ('', 0)) -> None: ...", ["a.py:1: f(which: tuple[str, int])"]),
        ("def f(shape: tuple[int, ...], box: tuple[int, int]) -> None: ...", []),
    ],
)
def test_a_tuple_of_unlike_things_is_named(text: str, found: list[str]) -> None:
    """Where it is a parameter; many of one kind are a sequence."""
    assert structure.tuple_parameters([source("a.py", text)]) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f():\n    about = {'a': 1}\n    g(**about)", ["a.py:3: **about"]),
        ("def f(about):\n    g(**about)", []),
    ],
)
def test_keywords_that_a_dictionary_hides_are_named(text: str, found: list[str]) -> None:
    """What a caller gave may be passed on; what was written down here is written where it goes."""
    assert structure.hidden_keywords([source("a.py", text)]) == found


def test_a_long_function_is_named() -> None:
    """Its lines are counted from the first to the last."""
    body = "\n".join("    pass" for _ in range(structure.FUNCTION_LINES_MAX))
    assert structure.long_functions([source("a.py", f"def f():\n{body}")]) == ["a.py:1: f has 61 lines"]


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("client/holdfast/tickets.py", "tests/client/test_tickets.py"),
        ("client/holdfast/demo/chart.py", "tests/demo/test_chart.py"),
        ("formats/holdfast_formats/layout/rules/table.py", "tests/formats/layout/rules/test_table.py"),
        ("service/holdfast_service/offline/__main__.py", "tests/offline/test_main.py"),
        ("client/holdfast/commands/import_.py", "tests/client/commands/test_import.py"),
    ],
)
def test_tests_mirror_modules(path: str, own: str) -> None:
    """A module's test file has its name, in the same folders."""
    assert structure.own_test(path) == own


@pytest.mark.parametrize(
    ("path", "text", "elsewhere", "found"),
    [
        ("client/holdfast/new.py", "def f(): return 1", {}, 1),
        ("client/holdfast/tickets.py", "def f(): return 1", {}, 1),
        ("client/holdfast/room/new.py", "def f(): return 1", {"tests/x.py": ["client/holdfast/room/"]}, 0),
        ("client/holdfast/room/new.py", "def f(): return 1", {"tests/x.py": ["client/holdfast/room/new.py"]}, 0),
        ("client/holdfast/room/new.py", "def f(): return 1", {"tests/x.py": ["client/holdfast/roo/"]}, 1),
        ("client/holdfast/room/__init__.py", "def f(): return 1", {}, 0),
        ("client/holdfast/new.py", "class P(Protocol):\n    def f(self) -> int: ...\nLIMIT = 5", {}, 0),
        ("client/holdfast/cli.py", "def f(): return 1", {}, 0),
    ],
)
def test_a_module_without_tests_is_named(path: str, text: str, elsewhere: dict[str, list[str]], found: int) -> None:
    """Unless it has a test file, stands in the list, by itself or with its folder, or does nothing."""
    assert len(structure.homeless([source(path, text)], elsewhere)) == found


@pytest.mark.parametrize(
    ("elsewhere", "found"),
    [
        ({"tests/formats/test_naming.py": ["formats/holdfast_formats/root_files.py"]}, "does not import"),
        ({"tests/formats/test_naming.py": ["client/holdfast/threads/"]}, "imports nothing of"),
        ({"tests/formats/test_naming.py": ["formats/holdfast_formats/naming.py"]}, "has its own tests"),
        ({"tests/formats/test_naming.py": ["formats/holdfast_formats/gone.py"]}, "is not there"),
        ({"tests/test_gone.py": []}, "tests/test_gone.py is not there"),
        ({"tests/client/test_policies.py": ["client/holdfast/tickets.py"]}, ""),
        ({"tests/client/test_policies.py": ["client/holdfast/stage/saves.py"]}, ""),
        ({"tests/client/test_policies.py": ["service/holdfast_service/daemon/saving/write_queue.py"]}, ""),
    ],
)
def test_a_line_of_the_list_that_is_not_true_is_named(
    modules: list[Source], elsewhere: dict[str, list[str]], found: str
) -> None:
    """What is imported counts however far away: behind `holdfast`'s lazy names, and in the daemon that a test starts."""
    problems = structure.wrong_homes(modules, elsewhere)
    assert found in " ".join(problems) if found else not problems
