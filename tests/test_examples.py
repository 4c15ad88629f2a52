"""Each example runs as its first lines say, and continues after its newest checkpoint when it is started again."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.daemons import RunningDaemon, free_port, running
from tests.forked import Forked

TOP = Path(__file__).parents[1]
EXAMPLES = TOP / "examples"
LINES_MAX = 80
TIMEOUT_S = 300
ONE_RANK = {
    "plain": "torch",
    "trainer": "accelerate",
    "lora": "peft",
    "lightning_callback": "lightning",
}  # and the package that it needs
RUNS = {"lightning_callback": "lightning", "ddp_ema": "ddp-ema"}  # others have the name of their file


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("examples") / "root") as one:
        yield one


def start(name: str, daemon: RunningDaemon, *, steps: int, ranks: int = 1) -> str:
    """What the example prints, on that many ranks, with the environment of torchrun if there are several."""
    script, port = str(EXAMPLES / f"{name}.py"), str(free_port())
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    environments = [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [{}]
    with tempfile.TemporaryFile() as output:
        processes = [
            Forked([script, f"--steps={steps}", f"--at={daemon.socket}"], os.environ | one, output=output.fileno())
            for one in environments
        ]
        ends = [process.wait(TIMEOUT_S) for process in processes]
        output.seek(0)
        printed = output.read().decode(errors="replace")
    assert ends == [0] * ranks, printed[-4000:]
    return printed


def committed(name: str, daemon: RunningDaemon) -> list[int]:
    folder = daemon.root / RUNS.get(name, name) / "checkpoints"
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


@pytest.mark.parametrize("name", ONE_RANK)
def test_an_example_continues(name: str, daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(ONE_RANK[name]) is None:
        pytest.skip(f"{ONE_RANK[name]} is not installed")
    monkeypatch.chdir(tmp_path)  # frameworks write beside their checkpoints
    start(name, daemon, steps=10)
    assert committed(name, daemon) == [10]
    printed = start(name, daemon, steps=20)
    assert committed(name, daemon)[-1] == 20  # Lightning's callback keeps one
    assert "ended at step 20" in printed or "starts with step 11" in printed


@pytest.mark.parametrize(("name", "first", "second"), [("ddp_ema", 2, 2), ("fsdp2", 2, 3)])
def test_an_example_of_several_ranks_continues(name: str, first: int, second: int, daemon: RunningDaemon) -> None:
    start(name, daemon, steps=10, ranks=first)
    printed = start(name, daemon, steps=20, ranks=second)
    assert committed(name, daemon) == [10, 20]
    # how many updates the daemon has added when a rank prints is a matter of time
    assert "average of" in printed or f"{second} ranks start with step 11" in printed


def test_the_notebook_runs(tmp_path: Path) -> None:
    """All cells in a kernel of their own, which starts a daemon as a user's would."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = [
        output["data"]["text/plain"] for cell in client.nb.cells for output in cell.get("outputs", ()) if "data" in output
    ]
    assert shown[0] == "'continues after step 0'"
    assert shown[-1] == "torch.Size([128, 32])"
    assert (tmp_path / "notebook-data" / "notebook" / "checkpoints" / "step-00000100" / "COMMIT").is_file()


def test_the_slurm_job_runs_as_a_script(tmp_path: Path) -> None:
    """Without Slurm too: daemon, torchrun, and the wait for the last save; two tasks of an array share a machine."""
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": commands,
        "RANKS": "1",
        "HOLDFAST_ROOT": str(tmp_path / "root"),
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", EXAMPLES / "slurm.sbatch", "--steps", "10"]
    tasks = {}
    for task in ("1", "2"):
        with open(tmp_path / task, "wb") as output:
            known = environment | {"SLURM_ARRAY_TASK_ID": task}
            tasks[task] = subprocess.Popen(command, cwd=TOP, env=known, stdout=output, stderr=output)
    ends = {task: process.wait(TIMEOUT_S) for task, process in tasks.items()}
    assert ends == {"1": 0, "2": 0}, "".join((tmp_path / task).read_text()[-4000:] for task in tasks)
    for task in tasks:
        assert (tmp_path / "root" / task / "fsdp2" / "checkpoints" / "step-00000010" / "COMMIT").is_file()


def test_the_kubernetes_job_agrees_with_the_one_for_teams() -> None:
    """The same image, socket and commands as deploy/kubernetes, whose files are checked against the schemas."""
    mine, teams = (_sidecar(TOP / path) for path in ("examples/kubernetes.yaml", "deploy/kubernetes/sidecar/job.yaml"))
    assert mine["image"] == teams["image"]
    assert mine["restartPolicy"] == teams["restartPolicy"] == "Always"
    assert {one for one in mine["args"] if not one.startswith("--listen=")} <= set(teams["args"])
    assert "lifecycle" not in mine and "lifecycle" not in teams


def _sidecar(path: Path) -> dict:  # type: ignore[type-arg]
    (job,) = [one for one in yaml.safe_load_all(path.read_text()) if one["kind"] == "Job"]
    (sidecar,) = job["spec"]["template"]["spec"]["initContainers"]
    return sidecar


def test_examples_are_short_and_listed() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix != ".md"}
    for page in ("README.md", "README.zh-CN.md"):
        text = (EXAMPLES / page).read_text()
        assert set(re.findall(r"^\| \[`([\w.]+)`\]\(\1\)", text, re.MULTILINE)) == names
    assert [name for name in names if _lines(EXAMPLES / name) > LINES_MAX] == []


def _lines(path: Path) -> int:
    if path.suffix == ".ipynb":
        return sum(len(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    return len(path.read_text().splitlines())
