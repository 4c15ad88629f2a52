"""The lines that a checkpoint's page offers to copy are run as they stand there, and do what the page says."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from holdfast import Checkpointer
from holdfast_formats.rest import bodies
from holdfast_formats.rest.runs import RunAbout
from holdfast_service.wings.console import recipes
from tests.daemons import running, wait_until
from tests.wings.console.reading import Page

STEPS, SAVE_EVERY = 40, 10
TIMEOUT_S = 300
_LINES = re.compile(r'<pre id="line-([\w-]+)"[^>]*><code>(.*?)</code>', re.DOTALL)
_SCRIPT = """
import torch
from pathlib import Path
{imports}
from holdfast import Checkpointer
with Checkpointer({run!r}, {{"model": {{"w": torch.zeros(4)}}}}, at={root!r}) as checkpointer:
    {body}
    Path("first").write_text(str(first))
"""


class Pages(NamedTuple):
    url: str
    root: Path

    def page(self, run: str, step: int | str, **layout: str) -> str:
        got = httpx.get(f"{self.url}/runs/{run}/checkpoints/{step}/restore", params=layout, trust_env=False)
        assert got.status_code == 200
        return got.text

    def lines(self, run: str, step: int | str, **layout: str) -> dict[str, str]:
        """The lines of each recipe by its key."""
        return {key: html.unescape(text) for key, text in _LINES.findall(self.page(run, step, **layout))}

    def abandoned(self, run: str) -> set[int]:
        listed = httpx.get(f"{self.url}/v1/runs/{run}/checkpoints", trust_env=False).json()["items"]
        return {one["step"] for one in listed if one["abandoned"]}

    def train(self, run: str, broken_from: int | None = None) -> None:
        """Save steps 10, 20, 30 and 40, and wait until they have been read back."""
        weights = torch.zeros(4)
        info = {"command": None}  # which is that of the tests
        with Checkpointer(run, {"model": {"w": weights}}, at=self.root, info=info) as checkpointer:
            for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY):
                weights.fill_(float("nan") if broken_from is not None and step >= broken_from else step)
                checkpointer.save(step, wait="durable")
        items = f"{self.url}/v1/runs/{run}/checkpoints?state=committed"
        wait_until(lambda: httpx.get(items, trust_env=False).json()["items"] == [], TIMEOUT_S)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    with running(tmp_path_factory.mktemp("recipes") / "a root", listen="127.0.0.1:0") as daemon:
        yield Pages(daemon.url, daemon.root)


def loop(lines: str, steps: int = STEPS + SAVE_EVERY) -> tuple[list[int], float]:
    """Run the lines for a loop; the steps that were trained, and what the weights held before the first."""
    weights, trained, held = torch.zeros(4), [], []

    def train(step: int) -> None:
        held.append(weights[0].item())
        trained.append(step)

    names: dict[str, Any] = {"state": {"model": {"w": weights}}, "steps": steps, "save_every": SAVE_EVERY, "train": train}
    exec(lines, names)
    return trained, held[0]


def shell(lines: str, directory: Path) -> None:
    about = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        lines, shell=True, cwd=directory, env=about, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_newest_step_needs_no_argument(pages: Pages) -> None:
    """The page says that nothing is left behind, and so it is."""
    pages.train("newest")
    assert "Nothing is lost or left behind" in Page(pages.page("newest", "latest")).text
    assert loop(pages.lines("newest", "latest")["loop"]) == (list(range(41, 51)), 40.0)
    assert pages.abandoned("newest") == set()


def test_an_older_step_leaves_newer_ones_behind(pages: Pages, tmp_path: Path) -> None:
    """The page says which, and how one is kept: as a checkpoint of its own that verifies."""
    pages.train("older")
    text, lines = Page(pages.page("older", 20)).text, pages.lines("older", 20)
    assert "marks 2 newer checkpoints (step 30 to 40) as abandoned" in text
    assert loop(lines["loop"], steps=25)[0] == list(range(21, 26))
    assert pages.abandoned("older") == set()  # nothing was saved on the new line yet
    shell(lines["keep"], tmp_path)
    shell("holdfast verify older-40", tmp_path)
    assert loop(lines["loop"]) == (list(range(21, 51)), 20.0)
    assert "What becomes of newer checkpoints" not in Page(pages.page("older", "latest")).text


def test_the_last_healthy_step_is_asked_for_by_health(pages: Pages) -> None:
    """A later start with the same lines does not go back."""
    pages.train("ill", broken_from=30)
    assert "2 newer ones have NaN or infinite values, from step 30 on" in Page(pages.page("ill", 20)).text
    assert "Resume from step 20, the last healthy one" in Page(pages.page("ill", 40)).text
    lines = pages.lines("ill", 20)["loop"]
    assert "restore(healthy=True)" in lines
    assert loop(lines, steps=30) == (list(range(21, 31)), 20.0)
    wait_until(lambda: httpx.get(f"{pages.url}/v1/runs/ill/checkpoints/30", trust_env=False).json()["verified"], TIMEOUT_S)
    assert loop(lines)[0] == list(range(31, 51))


def test_torchrun(pages: Pages, tmp_path: Path) -> None:
    """The command starts a script that takes the step from its environment; the one for the newest step sets nothing."""
    pages.train("torchrun")
    lines, newest = pages.lines("torchrun", 20), pages.lines("torchrun", "latest")
    imports, _, body = lines["environment"].partition("\n\n")
    body = body.replace("\n", "\n    ")
    (tmp_path / "train.py").write_text(_SCRIPT.format(imports=imports, run="torchrun", root=str(pages.root), body=body))
    shell(lines["torchrun"], tmp_path)
    assert (tmp_path / "first").read_text() == "21"
    assert "environment" not in newest and lines["torchrun"] == f"RESUME_STEP=20 {newest['torchrun']}"


_LAUNCHED = """
import os
import torch
from pathlib import Path
from holdfast import Checkpointer
with Checkpointer("launched", {{"model": {{"w": torch.zeros(4)}}}}, at={root!r}) as checkpointer:
    wanted = os.environ.get("RESUME_STEP")
    first = checkpointer.restore(step=int(wanted) if wanted else None) + 1
    Path("first").write_text(str(first))
    for step in (10, 20):
        if step >= first:
            checkpointer.save(step, wait="durable")
"""


def test_the_launch_itself_is_started_again(pages: Pages, tmp_path: Path) -> None:
    """Its own command line, in its own directory, stands first on both pages, and no other command is made up."""
    script = tmp_path / "my train.py"
    script.write_text(_LAUNCHED.format(root=str(pages.root)))
    shell(f"{sys.executable} {script.name!r} --lr 1", tmp_path)
    command = f"{sys.executable} 'my train.py' --lr 1\n"
    newest, older = pages.lines("launched", "latest"), pages.lines("launched", 10)
    assert next(iter(newest)) == "again" and newest["again"] == f"cd {tmp_path}\n{command}"
    assert older["again"] == f"cd {tmp_path}\nRESUME_STEP=10 {command}" and "environment" in older
    assert "torchrun" not in newest and "torchrun" not in older
    page = Page(httpx.get(f"{pages.url}/runs/launched", trust_env=False).text).text
    said = ("The command of attempt 1", "Start the script again, unchanged", "my train.py", "Python, your own loop")
    assert [page.index(one) for one in said] == sorted(page.index(one) for one in said)
    for lines, first in ((older["again"], "11"), (newest["again"], "21")):
        (tmp_path / "first").unlink()
        shell(lines, Path("/"))
        assert (tmp_path / "first").read_text() == first


def launch(world: int = 1, **info: Any) -> RunAbout:
    known = {"run": "r", "life": "died", "life_since": None, "owner": None, "notes": ""}
    return RunAbout.model_validate(known | {"launches": [{"attempt": 3, "at": "", "world": world, "info": info}]})


def test_ranks_are_started_by_their_launcher() -> None:
    """Whose command is in the record; without it, and where the record is cut or masked, the page says so."""
    command, torchrun = ["python", "-u", "train.py"], ["torchrun", "--nproc-per-node=2", "train.py"]

    def told(about: RunAbout | None) -> recipes.Snippet:
        return recipes.resume(checkpoint(10), "newest", "/data", about)[0]

    assert told(launch(2, command=command, launcher=torchrun)).lines == "torchrun --nproc-per-node=2 train.py\n"
    assert "on each of 2 ranks" in told(launch(2, command=command)).note
    assert "on each of" not in told(launch(1, command=command)).note
    assert "`***` is a secret" in told(launch(1, command=[*command, "***"])).note
    for none in (None, launch(1), launch(1, command="x"), launch(1, command=[*command, "… and 9 more"])):
        assert told(none).key == "loop"


def test_shards_of_a_layout(pages: Pages, tmp_path: Path) -> None:
    """Each way gives the same bytes of rank 0."""
    pages.train("cut")
    lines = pages.lines("cut", 20, sharding="2", stage="stage3")
    shell(lines["curl"], tmp_path)
    over_http = (tmp_path / "rank0.safetensors").rename(tmp_path / "over-http").read_bytes()
    shell(lines["one-rank"], tmp_path)
    shell(lines["all-ranks"], tmp_path)
    names: dict[str, Any] = {}
    exec(lines["python"], names)
    assert (tmp_path / "rank0.safetensors").read_bytes() == over_http
    assert len(list((tmp_path / "shards").iterdir())) == 2
    assert names["shard"]["w"].tolist() == [20.0, 20.0]


def test_examples_fit(pages: Pages) -> None:
    """Each example of a layout has shards; the form begins with one, and has what was asked for."""
    pages.train("fits")
    at = "/runs/fits/checkpoints/20/restore?"
    examples = [one for one in Page(pages.page("fits", 20)).addresses() if one.startswith(at)]
    assert len(examples) == 4
    for one in examples:
        page = Page(httpx.get(pages.url + one, trust_env=False).text)
        assert "Every rank’s shard as a file" in page.text and "alert" not in [
            e.attributes.get("role") for e in page.elements
        ]
    begins = Page(pages.page("fits", 20))
    assert "Every rank’s shard as a file" not in begins.text
    assert {"sharding": "2"}.items() <= {
        e.attributes.get("name"): e.attributes.get("value") for e in begins.all("input")
    }.items()


def checkpoint(step: int, **more: Any) -> bodies.CheckpointInfo:
    known = {"attempt": 1, "created": "", "world": 16, "groups": [], "tensors": 1, "files": 1, "bytes": 1, "metrics": {}}
    return bodies.CheckpointInfo(run="r", step=step, verified=True, **(known | more))


@pytest.mark.parametrize(
    ("made", "newer", "healthy", "how"),
    [
        (checkpoint(10), [], 10, "newest"),
        (checkpoint(10), [checkpoint(20, damage={})], 10, "newest"),
        (checkpoint(10), [checkpoint(20, abandoned=True)], 10, "newest"),
        (checkpoint(10), [checkpoint(20, healthy=False)], 10, "healthy"),
        (checkpoint(10), [checkpoint(20)], 20, "step"),
        (checkpoint(10, abandoned=True), [], 5, "step"),
        (checkpoint(10, damage={}), [], 5, "step"),
    ],
)
def test_what_restore_needs(
    made: bodies.CheckpointInfo, newer: list[bodies.CheckpointInfo], healthy: int, how: recipes.How
) -> None:
    """A step is named only where restore() would take another one."""
    assert recipes.how_to_reach(made, newer, healthy) == how


@pytest.mark.parametrize("how", ["newest", "healthy", "step"])
def test_lines_are_python(how: recipes.How) -> None:
    """Whatever stands in the root's name."""
    root = '/it\'s a "root" \\n'
    for one in recipes.resume(checkpoint(10), how, root):
        assert one.lines.endswith("\n")
        if one.key != "torchrun":
            compile(one.lines, one.key, "exec")
    assert "--nproc-per-node 8 " in recipes.resume(checkpoint(10), how, root)[2].lines


def test_a_viewer_without_the_root_gets_the_address() -> None:
    """Another directory, such as the current one, would begin a training without its checkpoints."""
    known = {"name": "n", "version": "1", "socket": None, "started": "", "arena_bytes": 0, "ranks": 0}
    here, hidden = (bodies.Page(items=[bodies.Node(root=root, **known)]) for root in ("/data", None))  # type: ignore[arg-type]
    assert recipes.place(here, "http://host:8420/") == "/data"
    assert recipes.place(hidden, "http://host:8420/") == recipes.place(None, "http://host:8420/") == "http://host:8420"
