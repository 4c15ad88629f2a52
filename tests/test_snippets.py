"""The pages for beginners, run from their first command to their last."""

from __future__ import annotations

import re

import pytest

from holdfast_formats import errors
from tests import snippets
from tests.daemons import free_port
from tests.databases import Postgres
from tests.snippets import BESIDE, TOP, Snippet

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


def test_many_nodes(postgres: Postgres) -> None:
    """Two daemons save checkpoints of two ranks together, and one rank goes on with one of them."""
    page = DOCS / "tutorials" / "many-nodes.md"
    said = snippets.run(page, HOLDFAST_CATALOG=postgres.make(), HEAD=f"127.0.0.1:{free_port()}")
    assert begins(said) == [0, 0, 60]
    assert re.search(r"^60\t.*\tverified\t", said, re.MULTILINE), said


def test_from_torch_save() -> None:
    """A file of `torch.save` is imported, and a training goes on from it and is read without Holdfast."""
    said = snippets.run(DOCS / "tutorials" / "from-torch-save.md")
    assert begins(said) == [100]
    assert "would import  mine@100" in said and "imported  mine@100" in said
    assert "tensors: ['0.bias', '0.weight', '2.bias', '2.weight']" in said


# A run that dies in step 500, with NaN, and of which one byte changes on the disk.
DYING = """
import os, signal, torch
from holdfast import Checkpointer

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
with Checkpointer("llama3-8b", {"model": model, "optim": optimizer}) as checkpointer:
    start = checkpointer.restore()
    print(f"begins after step {start}", flush=True)
    for step in range(start + 1, 601):
        model(torch.randn(8, 64)).pow(2).mean().backward()
        optimizer.step()
        if step == 500:
            checkpointer.fence()
            model.weight.data[0, 0] = torch.nan
        if step % 100 == 0:
            checkpointer.save(step, metrics={"loss": 1.0 / step}, wait="durable")
        if step == 500:
            os.kill(os.getpid(), signal.SIGKILL)
"""
BEFORE = [
    Snippet("sh", BESIDE, "holdfast serve --root holdfast-data --replica nas=nas\n"),
    Snippet("python", "train.py", DYING),
    Snippet("sh", "", "python train.py || echo died; holdfast wait llama3-8b@500\n"),
    Snippet("sh", "", "until holdfast show llama3-8b@300 | grep -q 'nas (present'; do sleep 0.2; done\n"),
    Snippet(
        "python",
        "",
        "with open('holdfast-data/llama3-8b/checkpoints/step-00000300/model.safetensors', 'r+b') as file:\n"
        "    file.seek(-5, 2)\n    file.write(b'\\x55')\n",
    ),
]


def test_when_something_went_wrong() -> None:
    """Of a run that died, with NaN and damage, each command of the page does what the page says."""
    said = snippets.run(DOCS / "when-something-went-wrong.md", BEFORE)
    assert begins(said) == [0, 500, 600]
    assert re.search(r"^llama3-8b\t.*\tdied\b", said, re.MULTILINE), said
    assert re.search(r"^model\tweight\tF32\t[1-9]", said, re.MULTILINE), said
    assert re.search(r"^repaired .*checkpoints/300", said, re.MULTILINE), said
    assert re.search(r"^kept: ", said, re.MULTILINE), said


@pytest.mark.parametrize("name", ["when-something-went-wrong.md", "when-something-went-wrong.zh-CN.md"])
def test_buttons_and_codes_that_help_exist(name: str) -> None:
    """Each button and alert that the page tells people to look for is on the pages, and each code is an error's."""
    text = (DOCS / name).read_text()
    console = TOP / "service" / "holdfast_service" / "wings" / "console"
    pages = "\n".join(path.read_text() for path in sorted(console.rglob("*")) if path.suffix in {".py", ".html"})
    shown = {re.sub(r" \d+$", "", word) for word in re.findall(r"`([A-Z][a-z]\w* ?[^`(]*)`", text)}
    buttons = {word for word in shown if not hasattr(errors, word)} - {"SaveWarning"}
    assert {"Resume from step", "Acknowledge", "Died"} <= buttons
    assert [word for word in sorted(buttons) if word not in pages] == []
    codes = {error.code for error in vars(errors).values() if isinstance(error, type) and hasattr(error, "code")}
    listed = re.findall(r"`([a-z-]+)`", "\n".join(re.findall(r"^\| (`[a-z]+-[a-z-]+`[^|]*)", text, re.MULTILINE)))
    assert len(listed) > 6 and set(listed) <= codes
