"""docs/layouts.md: its layouts parse, what it calls refused is refused, its pictures show what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.language import FORMS, KEYS, METHODS, parse
from holdfast_formats.layout.sharding import cuts
from holdfast_formats.tensors import TensorSpec

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("layouts.md", "layouts.zh-CN.md")}
EXAMPLE = re.compile(rf"`((?:{'|'.join(KEYS)})=[^`]*)`")
PICTURES = sorted((DOCS / "layouts").glob("*.svg"))


def blocks(page: str, kind: str) -> list[str]:
    return [line for block in re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]


def words(picture: str) -> list[str]:
    root = ElementTree.parse(DOCS / "layouts" / picture).getroot()
    return ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_layout_of_the_page_is_one(page: str) -> None:
    """Inline examples, examples in blocks and the JSON object parse."""
    examples = EXAMPLE.findall(page) + blocks(page, "layout")
    assert len(examples) > 30
    for example in examples:
        parse(example)
    (written,) = blocks(page, "json")
    assert parse(written) == parse("tp=4,ep=2,pp=4:8/8/8/6,sharding=8:stage1:flat:align=128")


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_what_the_page_calls_refused_is_refused(page: str) -> None:
    """Each line of it, and there are some."""
    lines = blocks(page, "refused")
    assert len(lines) == 5
    for line in lines:
        with pytest.raises(InvalidRequest):
            parse(line)


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_the_page_names_everything(page: str) -> None:
    """Every key, pattern, method and option of the language is in it."""
    for key in KEYS:
        assert re.search(rf"`{key}=", page), key
    for word in {*METHODS, *(pattern for patterns in FORMS.values() for pattern in patterns)}:
        assert f"`{word}`" in page, word
    for option in {option for options in METHODS.values() for option in options}:
        assert re.search(rf"`{option}[`=]", page), option


def test_every_picture_is_shown_and_is_readable() -> None:
    """On a light ground of its own, in both pages, with words for who cannot see it."""
    assert [path.name for path in PICTURES] == ["flat.svg", "mesh.svg", "qkv.svg"]
    for path in PICTURES:
        root = ElementTree.parse(path).getroot()
        assert [child.tag.rpartition("}")[2] for child in root][:3] == ["title", "desc", "rect"]
        assert root[2].attrib["fill"] == "#ffffff"
        assert all(f"(layouts/{path.name})" in page for page in PAGES.values())


def test_the_mesh_in_the_picture_is_the_codes() -> None:
    """The ranks of both drawn meshes, in the order in which they are drawn: stage, replica, tensor-parallel rank."""
    drawn = words("mesh.svg")
    layouts = [parse(word) for word in drawn if "=" in word and "," in word]
    ranks = [int(word) for word in drawn if word.isdigit()]
    assert ranks == [
        layout.mesh.rank(pp=pp, dp=dp, tp=tp) for layout in layouts for pp in range(2) for dp in range(2) for tp in range(2)
    ]


def test_the_flat_buffer_in_the_picture_is_the_codes() -> None:
    """The ranges written under the drawn buffer, and where its shares end."""
    drawn = words("flat.svg")
    tensors = [TensorSpec("model", name, "F32", (size,)) for name, size in (("a", 10), ("b", 7), ("c", 5))]
    cut = cuts(tensors, parse(drawn[0]), 4)
    lines = [f"rank {r}: " + " ".join(f"{'abc'[p]}[{start}:{stop}]" for p, start, stop in cut.of(r)) for r in range(4)]
    assert [word for word in drawn if word.startswith("rank")] == lines
    assert str(4 * int(cut.share[0])) in drawn


def test_the_heads_in_the_picture_stand_in_their_patterns() -> None:
    """Every pattern is drawn, each head once: sixteen in the grouped rows, twelve where heads are of one number."""
    drawn = words("qkv.svg")
    rows = {name: drawn.index(f"qkv={name}") for name in FORMS["qkv"] if name != "split"}
    for name, at in rows.items():
        heads = [word for word in drawn[at + 1 : at + 18] if re.fullmatch("[qkv][0-9]", word)]
        assert len(set(heads)) == len(heads) == (12 if name == "heads" else 16)
