"""Commit objects: both ways, and what is refused, by the name of the object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_files.objects import commit_objects
from holdfast_files.objects.commit_objects import (
    COMMIT_OBJECT_BYTES_MAX,
    SUMMARY_BYTES_MAX,
    Published,
    commit_object,
    decode,
    encode,
)
from holdfast_formats import naming
from holdfast_formats.errors import CorruptManifest
from holdfast_formats.naming import Place

RUN, STEP = "run", 7
ONE = Published("step-00000007.a1.r5", "0" * 64, "r5")
TWO = Published("step-00000007.a2.r123456789012345678", "f" * 64, "node-1.0a1b")


@given(
    st.integers(0, naming.STEP_MAX),
    st.integers(0, naming.ATTEMPT_MAX),
    st.integers(1, naming.ROUND_ID_MAX),
    st.lists(st.booleans(), max_size=2),
    st.integers(1, 64),
)
def test_a_commit_object_reads_back(step: int, attempt: int, round_id: int, kept: list[bool], writer: int) -> None:
    """Every place, and what it replaced at the same positions; the longest one is within the limit."""
    data = naming.data_directory(Place(RUN, step, attempt, round_id))
    one = Published(data, "a" * 64, "w" * writer)
    content = commit_object(one, tuple(one if each else None for each in kept))
    encoded = encode(content, RUN, step)
    assert decode(encoded, RUN, step) == content and encoded.count(b"\n") == 1
    assert len(encoded) < commit_objects.COMMIT_OBJECT_BYTES_MAX
    assert len(content.kept) == 1 + sum(kept)
    assert commit_objects.may_name_replaced(len(encoded)) == any(kept)


def test_the_longest_summaries_are_within_the_limit() -> None:
    """Of the checkpoint and of the two that it has replaced; a longer one is left out."""
    summary = {"created": " " * (SUMMARY_BYTES_MAX - len(b'{"created":""}'))}
    assert commit_objects.short_enough(summary) is summary
    assert commit_objects.short_enough({"created": summary["created"] + " "}) is None
    one, two = Published(ONE.data, "0" * 64, "w" * 64, summary), Published(TWO.data, "f" * 64, "w" * 64, summary)
    content = commit_object(one, (two, two))
    assert decode(encode(content, RUN, STEP), RUN, STEP) == content


def test_nothing_is_named_after_the_last_replaced() -> None:
    """What was released at the end leaves no trace, so that equal contents are equal bytes."""
    assert encode(commit_object(ONE, (None, None)), RUN, STEP) == encode(commit_object(ONE), RUN, STEP)
    assert commit_object(ONE, (None, TWO)).replaced == (None, TWO)


def _changed(**members: Any) -> bytes:
    return json.dumps({**json.loads(encode(commit_object(ONE, (TWO,)), RUN, STEP)), **members}).encode()


def _named(**members: Any) -> bytes:
    return _changed(checkpoint={"data": ONE.data, "manifest_sha256": "0" * 64, "writer": "w", **members})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "cannot be read"),
        (b"{}", "format"),
        (b"null", "object"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 4000, "cannot be read"),
        (b" " * (COMMIT_OBJECT_BYTES_MAX + 1), f"over {COMMIT_OBJECT_BYTES_MAX} bytes"),
        (_changed(format="1"), "format"),
        (_changed(more=1), "more"),
        (_changed(replaced=[None, None, None]), "3 replaced"),
        (_changed(replaced=None), "replaced"),
        (_named(data="../../other"), "is not the name"),
        (_named(data="step-00000007.a1"), "is not the name"),
        (_named(data="step-00000007.a1.r5/x"), "is not the name"),
        (_named(data="step-00000008.a1.r5"), "step 8"),
        (_named(manifest_sha256="0" * 63), "digest"),
        (_named(manifest_sha256="A" * 64), "digest"),
        (_named(writer=""), "writer"),
        (_named(writer="a\nb"), "writer"),
        (_named(writer="a" * 65), "writer"),
        (_changed(replaced=[{"data": "x", "manifest_sha256": "0" * 64, "writer": "w"}]), "is not the name"),
    ],
)
def test_what_is_no_commit_object(data: bytes, why: str) -> None:
    """It is named, with the reason; nothing of it is used."""
    with pytest.raises(CorruptManifest, match=why) as caught:
        decode(data, RUN, STEP)
    assert "run/commits/step-00000007" in str(caught.value) and caught.value.hint


def test_a_commit_object_of_a_newer_version() -> None:
    """It is told from damage."""
    with pytest.raises(CorruptManifest, match=r"format 2.*reads format 1") as caught:
        decode(_changed(format=2), RUN, STEP)
    assert "version" in caught.value.hint


def test_what_could_not_be_read_is_not_written() -> None:
    """The other half of the check."""
    with pytest.raises(CorruptManifest):
        encode(commit_object(ONE), RUN, STEP + 1)


@pytest.mark.parametrize("page", ["format.md", "format.zh-CN.md"])
def test_the_documented_commit_object(page: str) -> None:
    """It is one that is written so."""
    text = (Path(__file__).parents[3] / "docs" / page).read_text()
    (line,) = [line for line in text.splitlines() if line.startswith('{"format":1,"checkpoint"')]
    one = Published("step-00000500.a3.r17", "0" * 64, "r17")
    assert encode(commit_object(one), RUN, 500).decode().rstrip() == line.replace("df4a8f2b…a3acac", "0" * 64)
    assert f"{commit_objects.COMMIT_OBJECT_BYTES_MAX}" in text
