"""The pages for beginners, run from their first command to their last."""

from __future__ import annotations

import re

from tests import snippets
from tests.snippets import TOP

DOCS = TOP / "docs"


def begins(said: str) -> list[int]:
    """The steps after which the page's trainings say that they begin."""
    return [int(step) for step in re.findall(r"begins after step (\d+)$", said, re.MULTILINE)]


def test_get_started() -> None:
    """A training that is killed goes on from a step that was saved, and is listed with its checkpoints verified."""
    said = snippets.run(DOCS / "get-started.md")
    first, second = begins(said)
    assert first == 0 and 200 <= second < 3000 and second % 100 == 0
    assert re.search(r"^2900\t.*\tverified\t", said, re.MULTILINE), said
    assert "http://127.0.0.1:" in said and "model.safetensors" in said


def test_fsdp2() -> None:
    """Two ranks, of which one is killed, go on together, and one rank goes on from both."""
    said = snippets.run(DOCS / "tutorials" / "fsdp2.md")
    assert "a rank was killed" in said
    again = begins(said)[2]
    assert begins(said) == [0, 0, again, again, 200] and 0 < again <= 140
    assert "torch.Size" not in said and "(256, 32)" in said


def test_from_torch_save() -> None:
    """A file of `torch.save` is imported, and a training goes on from it and is read without Holdfast."""
    said = snippets.run(DOCS / "tutorials" / "from-torch-save.md")
    assert begins(said) == [100]
    assert "would import  mine@100" in said and "imported  mine@100" in said
    assert "tensors: ['0.bias', '0.weight', '2.bias', '2.weight']" in said
