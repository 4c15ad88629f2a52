"""The documents: what they name exists, and each Chinese page says what its English one says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from typer.main import get_command

import holdfast
from holdfast.checkpointer import Checkpointer
from holdfast.cli import app
from holdfast_formats.errors import EXIT_STATUS

TOP = Path(__file__).parent.parent
CHINESE = ".zh-CN.md"
READMES = [TOP / "README.md", TOP / "README.zh-CN.md"]
PAGES = sorted((TOP / "docs").rglob("*.md"))
EXAMPLES = [TOP / "examples" / "README.md", TOP / "examples" / "README.zh-CN.md"]
TRANSLATED = [TOP / "README.zh-CN.md", EXAMPLES[1], *(page for page in PAGES if page.name.endswith(CHINESE))]
BENCHMARKS = "benchmarks.md"  # in English only
DOCUMENTS = [*READMES, *PAGES, *EXAMPLES, TOP / "ARCHITECTURE.md", TOP / "CONTRIBUTING.md", TOP / "CHANGELOG.md"]
README_LINES_MAX = 150
ARCHITECTURE_LINES_MAX = 500
COLUMNS_MAX = 120
GLOSSARY_WORDS_MAX = 40
COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def outline(text: str) -> list[str]:
    """The levels of headings, tables' rows and list items in order: what a translation keeps."""
    marks = re.findall(r"^(#+ |\| ?|- |```)", text, re.MULTILINE)
    return [mark.strip() for mark in marks]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9]+):.*## ", (TOP / "Makefile").read_text(), re.MULTILINE))


def english(translated: Path) -> Path:
    return translated.with_name(translated.name.replace(CHINESE, ".md"))


def in_both(name: str) -> list[Path]:
    return [TOP / "docs" / f"{name}.md", TOP / "docs" / f"{name}{CHINESE}"]


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda path: path.name)
def test_a_translation_has_the_same_outline(page: Path) -> None:
    """Headings, table rows, list items and code blocks follow one another in the same order in both languages."""
    assert outline(page.read_text()) == outline(english(page).read_text())


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda path: path.name)
def test_a_translation_has_the_same_code(page: Path) -> None:
    """Code is not translated, so that it cannot differ."""
    assert code_blocks(page.read_text()) == code_blocks(english(page).read_text())


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda path: path.name)
def test_a_translation_names_the_same_things(page: Path) -> None:
    """What stands in backquotes, and what is linked, is the same in both."""
    texts = [prose(path.read_text()) for path in (english(page), page)]
    for pattern in (r"`([^`\n]+)`", r"\]\(([^)#]+)\)"):
        named = [set(re.findall(pattern, text)) - {"README.md", "README.zh-CN.md"} for text in texts]
        assert named[0] == named[1]


def test_every_guide_is_translated_and_in_the_site() -> None:
    """All pages but the benchmarks are in both languages, and the site's navigation has each of them once."""
    names = {str(page.relative_to(TOP / "docs")) for page in PAGES}
    guides = {name for name in names if not name.endswith(CHINESE)} - {BENCHMARKS}
    assert {name.replace(".md", CHINESE) for name in guides} == {name for name in names if name.endswith(CHINESE)}
    listed = re.findall(r": ([\w/-]+\.md)$", (TOP / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({*guides, BENCHMARKS})


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=lambda path: path.name)
def test_lines_are_of_a_width_that_people_read(page: Path) -> None:
    """Only tables, links and code have longer lines; the README is one that people read to its end."""
    lines = prose(page.read_text()).splitlines()
    assert [line for line in lines if len(line) > COLUMNS_MAX and not re.match(r"\s*(\||!?\[|`)", line)] == []
    assert page not in READMES or len(page.read_text().splitlines()) <= README_LINES_MAX


def test_the_architecture_stays_readable() -> None:
    """It is of a length that people read, no line is too long but in tables, and every invariant is in it."""
    text = (TOP / "ARCHITECTURE.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= ARCHITECTURE_LINES_MAX
    assert [line for line in lines if len(line) > COLUMNS_MAX and not line.startswith("|")] == []
    assert [f"I{number}" for number in range(1, 11)] == re.findall(r"^- \*\*(I\d+)\*\*", text, re.MULTILINE)


def test_the_journeys_of_the_architecture_exist() -> None:
    """Each step of a save and of a restore names a module, and a function or a method of it."""
    named = re.findall(r"`(holdfast\w*(?:/\w+)*):(\w+(?:\.\w+)?)`", (TOP / "ARCHITECTURE.md").read_text())
    assert len(named) > 30
    for path, what in named:
        found: object = importlib.import_module(path.replace("/", "."))
        for name in what.split("."):
            assert hasattr(found, name), (path, what)
            found = getattr(found, name)


def test_the_picture_says_the_same_in_light_and_dark() -> None:
    """Its two files differ in their colours alone."""
    light, dark = ((TOP / "docs" / "pictures" / f"how-it-works-{kind}.svg").read_text() for kind in ("light", "dark"))
    assert light != dark
    assert re.sub(r"#[0-9a-f]{6}", "", light) == re.sub(r"#[0-9a-f]{6}", "", dark)


def test_a_word_is_explained_in_one_place() -> None:
    """The glossary has the product's words, the architecture those of the code alone; both languages have 40 at most."""
    explained = [re.findall(r"^\| ([^|]+?) \| [^|]+\|$", page.read_text(), re.MULTILINE)[1:] for page in in_both("glossary")]
    assert len(explained[0]) == len(explained[1]) <= GLOSSARY_WORDS_MAX
    assert explained[0] == sorted(explained[0])
    of_code = (TOP / "ARCHITECTURE.md").read_text().split("## Words")[1].split("## Decisions")[0]
    words = {word.strip() for entry in re.split(r"[·,]", re.sub(r"\([^)]*\)", "", of_code)) for word in entry.split("\n")}
    assert "seal" in words and not words & set(explained[0])


@pytest.mark.parametrize("page", in_both("python"), ids=lambda path: path.name)
def test_every_public_name_is_in_the_python_reference(page: Path) -> None:
    """The reference is generated from the docstrings of all that `holdfast` exports."""
    shown = re.findall(r"^::: holdfast\.(\w+)$", page.read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(set(holdfast.__all__) - {"CheckpointError", "__version__"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_linked_file_exists(document: Path) -> None:
    """Links into the repository lead somewhere."""
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


def anchors_of(document: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_linked_heading_exists(document: Path) -> None:
    """In the page that is named: a link from one Chinese page to a heading of another names the Chinese file."""
    links = [link for link in re.findall(r"\]\(([^)\s]*\.md)?#([^)\s]+)\)", document.read_text()) if "://" not in link[0]]
    dead = [link for link in links if link[1] not in anchors_of(document.parent / link[0] if link[0] else document)]
    assert dead == []


@pytest.mark.parametrize("page", in_both("cli"), ids=lambda path: path.name)
def test_every_command_is_in_the_table_and_exists(page: Path) -> None:
    """The table of commands is exactly what `holdfast` offers."""
    listed = re.findall(r"^\| `holdfast (\w+)", page.read_text(), re.MULTILINE)
    assert sorted(listed) == COMMANDS


@pytest.mark.parametrize("document", [*READMES, TOP / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_every_make_target_named_exists(document: Path) -> None:
    """No document tells people to make what cannot be made."""
    named = set(re.findall(r"\bmake (?:[A-Z_]+=\S+ )*([a-z0-9]+)\b", "\n".join(code_lines(document.read_text()))))
    assert named
    assert named <= targets()


def code_lines(text: str) -> list[str]:
    return [*code_blocks(text), *re.findall(r"`([^`\n]+)`", prose(text))]


@pytest.mark.parametrize("page", in_both("cli"), ids=lambda path: path.name)
def test_every_exit_status_is_documented(page: Path) -> None:
    """The table has done, failed, and one row for each branch of the error tree."""
    listed = [int(number) for number in re.findall(r"^\| (\d+) \|", page.read_text(), re.MULTILINE)]
    assert listed == [0, 1, *sorted(EXIT_STATUS.values())]


@pytest.mark.parametrize("page", in_both("saving"), ids=lambda path: path.name)
def test_every_option_of_the_checkpointer_is_documented(page: Path) -> None:
    """Each keyword of `Checkpointer` and of `save()` stands in its table."""
    options = set(Checkpointer.__init__.__kwdefaults__ or {}) | set(Checkpointer.save.__kwdefaults__ or {})
    assert {"policy", "assets"} < options
    assert [name for name in sorted(options) if not re.search(rf"^\| .*`{name}`", page.read_text(), re.MULTILINE)] == []


def test_nothing_that_is_made_is_left_out_of_help() -> None:
    """Every target of the Makefile but files is declared phony and explained."""
    text = (TOP / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == targets()
