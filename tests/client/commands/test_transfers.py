"""`holdfast export`, `import` and `repair` on bare directories, and replicas of a real daemon as people see them."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from holdfast_formats import naming
from holdfast_service.__main__ import main
from holdfast_service.storage import lock_root
from tests.checkpoints import build_root, flip
from tests.daemon.copies_world import contents
from tests.daemons import running, wait_until
from tests.kit.commands import call, call_json
from tests.serving import served

pytestmark = pytest.mark.usefixtures("forked_programs")

STEP_5 = naming.checkpoint_path("tiny", 5)


@pytest.fixture
def root(tmp_path: Path, no_service: None) -> Path:
    """A root with a run, and no service."""
    build_root(tmp_path / "root", {"tiny": (5, 10)})
    return tmp_path / "root"


@pytest.mark.parametrize("way", ["root", "url"])
def test_export(root: Path, tmp_path: Path, way: str) -> None:
    """The whole checkpoint, or its model alone, from the directory or over HTTP; nothing but the target is left."""
    place = tmp_path / "place"
    place.mkdir()
    with served(root) as service:
        where = ["--root", str(root)] if way == "root" else ["--url", service.url]
        whole = call_json("export", "tiny@5", place / "whole", *where)
        model = call("export", "tiny@latest", place / "model", "--model-only", *where)
    assert whole["committed"] and model.exit_code == 0 and "exported" in model.output
    assert contents(place / "whole") == contents(root / STEP_5)
    assert not (place / "model" / naming.COMMIT).exists()
    assert sorted(os.listdir(place)) == ["model", "whole"]
    assert call("verify", place / "whole").exit_code == 0


def test_export_refuses_what_is_there(root: Path, tmp_path: Path) -> None:
    """A file, a link, or a directory with files is not touched; damage leaves nothing behind."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for target in ("full", "link", "full/mine"):
        assert call("export", "tiny@5", tmp_path / target, "--root", root).exit_code == 2
    (tmp_path / "empty").mkdir()
    assert call("export", "tiny@5", tmp_path / "empty", "--root", root).exit_code == 0
    flip(root / STEP_5 / "config.json", 3)
    assert call("export", "tiny@5", tmp_path / "out", "--root", root).exit_code == 5
    assert sorted(os.listdir(tmp_path)) == ["empty", "full", "link", "root"]
    assert os.listdir(tmp_path / "full") == ["mine"]


def test_what_a_killed_export_left_is_taken_away(root: Path, tmp_path: Path) -> None:
    """The next one to the same name begins anew."""
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "half").write_text("x")
    assert call("export", "tiny@5", tmp_path / "out", "--root", root).exit_code == 0
    assert contents(tmp_path / "out") == contents(root / STEP_5)
    assert not (tmp_path / ".out.partial").exists()


def test_import_without_a_daemon(root: Path, tmp_path: Path) -> None:
    """A Hugging Face directory becomes a checkpoint of a root, a new one too; refused a second time, as is nonsense."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    (tmp_path / "hf").mkdir()
    save_file({"w": array}, tmp_path / "hf" / "model.safetensors")
    for target in (root, tmp_path / "new"):
        done = call_json("import", tmp_path / "hf", "mine@3", "--root", target)
        assert (done["tensors"], done["step"]) == (1, 3)
        found = load_file(target / naming.checkpoint_path("mine", 3) / "model.safetensors")
        assert np.array_equal(found["w"], array)
        assert call("verify", "mine@3", "--root", target).exit_code == 0
    assert call("import", tmp_path / "hf", "mine@3", "--root", root).exit_code == 4
    assert call("import", tmp_path / "missing", "mine@4", "--root", root).exit_code == 2
    assert call("import", tmp_path / "hf", "mine@4", "--root", root, "--url", "http://x").exit_code == 2
    said = call("import", tmp_path / "hf", "mine@4", "--root", root)
    assert said.exit_code == 0 and "verified" in said.output


@pytest.mark.parametrize("way", ["root", "url"])
def test_an_import_leaves_out_by_name(root: Path, tmp_path: Path, way: str) -> None:
    """What is refused is left out by the option that the error names, and the command lists it; so does a conversion."""
    source = tmp_path / "place" / "hf"
    source.mkdir(parents=True)
    save_file({"w": np.ones((3, 4), np.float32), "v": np.ones(3, np.float32)}, source / "model.safetensors")
    (source / "optimizer.pt").write_bytes(b"12345")
    (source / "scheduler.pt").write_bytes(b"1")
    with ExitStack() as held:
        where: list[object] = [source, "mine@3", "--root", root]
        if way == "url":
            where = [source, "mine@3", "--url", held.enter_context(running(root, listen="127.0.0.1:0")).url]
        refused = call("import", *where)
        wrong = call("import", *where, "--leave-out", "optimiser.pt", "--weights-only")
        said = call("import", *where, "--leave-out", "optimizer.pt", "--leave-out", "v", "--weights-only")
    assert refused.exit_code == 2
    assert "--leave-out optimizer.pt --leave-out scheduler.pt, or --weights-only" in " ".join(refused.output.split())
    assert wrong.exit_code == 2 and "--leave-out optimiser.pt matches nothing" in " ".join(wrong.output.split())
    for line in (
        "optimizer.pt (5 B): --leave-out optimizer.pt",
        "scheduler.pt: --weights-only",
        "model/v (1 tensor, 12 B): --leave-out v",
    ):
        assert f"left out  {line}" in said.output
    assert "left out    scheduler.pt: --weights-only" in call("show", "mine@3", "--root", root).output
    assert set(load_file(root / naming.checkpoint_path("mine", 3) / "model.safetensors")) == {"w"}
    converted = call("convert", source, tmp_path / "out", "--as", "hf", "--weights-only")
    assert converted.exit_code == 0 and "left out  optimizer.pt: --weights-only" in converted.output


@pytest.mark.parametrize("way", ["root", "url"])
def test_a_dry_run_says_what_would_become_of_what(root: Path, tmp_path: Path, way: str) -> None:
    """Tensors by group, every file of the source with a reason where it is not used; nothing is written, with either."""
    source = tmp_path / "place" / "hf"
    source.mkdir(parents=True)
    save_file({"[/w]": np.ones((3, 4), np.float32)}, source / "model.safetensors")
    (source / "tf_model.h5").write_bytes(b"again")
    (source / "config.json").write_text("{}")
    with ExitStack() as held:
        where: list[object] = [source, "mine@3", "--root", tmp_path / "other"]
        if way == "url":
            daemon = running(root, listen="127.0.0.1:0")
            where = [source, "mine@3", "--url", held.enter_context(daemon).url]
        said = call("import", *where, "--dry-run")
        told = call_json("import", *where, "--dry-run", "--from", "hf")
        refused = call("import", *where, "--from", "paper", "--dry-run")
    assert said.exit_code == 0 and "would import" in said.output
    assert "tf_model.h5" in said.output and "not compared, not imported" in said.output
    assert told["groups"] == {"model": {"tensors": 1, "bytes": 48, "dtypes": ["F32"], "names": ["[/w]"]}}
    uses = {file["file"]: file["use"] for file in told["source"]["files"]}
    assert uses == {"model.safetensors": "tensors", "config.json": "asset", "tf_model.h5": "unused"}
    assert refused.exit_code == 2 and "unknown kind 'paper'" in refused.output
    assert not (tmp_path / "other").exists() and not (root / "mine").exists()


def test_a_dry_run_makes_nothing_in_a_root(root: Path, tmp_path: Path) -> None:
    """Neither in one that is there, nor in one that a daemon serves; a step that is taken is said."""
    (tmp_path / "hf").mkdir()
    save_file({"w": np.ones((3, 4), np.float32)}, tmp_path / "hf" / "model.safetensors")
    before = {path: path.lstat().st_mtime_ns for path in (root, *root.rglob("*"))}
    assert call("import", tmp_path / "hf", "mine@3", "--root", root, "--dry-run").exit_code == 0
    assert call("import", tmp_path / "hf", "tiny@5", "--root", root, "--dry-run").exit_code == 4
    copied = call_json("import", root / STEP_5, "mine@3", "--root", root, "--dry-run")
    assert copied["dry_run"] and copied["source"]["kind"] == "holdfast"
    assert call("import", tmp_path / "hf", "mine@3", "--root", root / STEP_5, "--dry-run").exit_code == 2
    assert before == {path: path.lstat().st_mtime_ns for path in (root, *root.rglob("*"))}
    lock = lock_root(root)
    try:
        assert call("import", tmp_path / "hf", "mine@3", "--root", root, "--dry-run").exit_code == 0
    finally:
        lock.release()


def test_a_program_that_is_not_there(root: Path, tmp_path: Path) -> None:
    """A path that leads nowhere is not taken for the name of a program."""
    for given in ("./missing", "missing.toml"):
        said = call("import", tmp_path, "mine@3", "--root", tmp_path / "other", "--program", given)
        assert said.exit_code == 2 and "there is no file" in said.output


def test_repair_without_a_daemon(root: Path, tmp_path: Path) -> None:
    """From a replica's root or from a single checkpoint's directory in one; without either the damage is left, and said."""
    shutil.copytree(root, tmp_path / "far")
    before = contents(root / STEP_5)
    for source in (tmp_path / "far", tmp_path / "far" / STEP_5):
        flip(root / STEP_5 / "config.json", 3)
        (root / STEP_5 / naming.MANIFEST).unlink()
        done = call_json("repair", "tiny@5", "--root", root, "--from", source)
        assert {file["file"] for file in done["repaired"]} == {naming.MANIFEST, "config.json"}
        assert contents(root / STEP_5) == before
    assert "intact" in call("repair", "tiny@5", "--root", root).output
    flip(root / STEP_5 / "config.json", 3)
    assert call("repair", "tiny@5", "--root", root).exit_code == 5
    assert call("repair", "tiny@5", "--from", tmp_path / "far").exit_code == 2
    assert call("repair", "tiny@77", "--root", root).exit_code == 3
    lock = lock_root(root)
    refused = call("repair", "tiny@5", "--root", root)
    assert refused.exit_code == 4 and "let it repair: `holdfast repair tiny@5`" in " ".join(refused.output.split())
    lock.release()


def test_the_daemon_of_a_root_repairs_there(root: Path, tmp_path: Path) -> None:
    """From what it has itself. It is not given other sources, so `--from` is refused while it serves."""
    with running(root, listen="127.0.0.1:0"):
        assert "intact" in call("repair", "tiny@5", "--root", root).output
        assert call("repair", "tiny@5", "--root", root, "--from", tmp_path).exit_code == 4


def test_a_daemon_copies_and_people_see_it(root: Path, tmp_path: Path) -> None:
    """`--replica`: copies appear, `show` and the API name them; a start mends from them; they outlive the root."""
    with running(root, "--replica", f"far={tmp_path / 'far'}", listen="127.0.0.1:0") as daemon:
        found: list[dict] = []

        def copied() -> bool:
            path = f"{daemon.url}/v1/runs/tiny/checkpoints/latest/replicas"
            found[:] = httpx.get(path, trust_env=False).raise_for_status().json()["items"]
            return [replica["state"] for replica in found] == ["present"]

        verified = root / naming.CATALOG  # nothing verifies what stood there before: the catalog is told
        assert verified.exists()
        with sqlite3.connect(verified, timeout=180) as database:
            database.execute("UPDATE checkpoints SET verified = 1")
        database.close()
        wait_until(copied)
        assert (found[0]["tier"], found[0]["problem"]) == ("far", None)
        shown = call("show", "tiny@10", "--url", daemon.url)
        assert "far (present" in shown.output
        assert call_json("show", "tiny@10", "--url", daemon.url)["replicas"][0]["tier"] == "far"
        wait_until(lambda: (tmp_path / "far" / STEP_5).exists())
        damaged = max((root / STEP_5).glob("model*.safetensors"))
        flip(damaged, damaged.stat().st_size - 1)
        assert call("verify", "tiny@5", "--url", daemon.url).exit_code in (0, 5)  # the service repairs what a reader meets
        wait_until(lambda: call("verify", "tiny@5", "--url", daemon.url).exit_code == 0)
        told = call("verify", "tiny@5", "--url", daemon.url).output
        assert "was repaired from replica far" in told and "intact" not in told
    before = contents(root / STEP_5)
    (root / STEP_5 / naming.MANIFEST).write_bytes(b"{}")
    with running(root, "--replica", f"far={tmp_path / 'far'}"):
        wait_until(lambda: contents(root / STEP_5) == before)
    shutil.rmtree(root)
    assert [run["name"] for run in call_json("ls", "--root", tmp_path / "far")] == ["tiny"]
    assert call("restore", "tiny@latest", "--root", tmp_path / "far", "--out", tmp_path / "out").exit_code == 0
    assert call("verify", tmp_path / "out").exit_code == 0


def test_a_root_is_no_url(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--root http://…` makes no directory `http:`."""
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())
    refused = call("import", root / STEP_5, "tiny@7", "--root", "http://bucket/place")
    assert refused.exit_code == 2 and "is a URL" in " ".join(refused.output.split())
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("{root}/inside", "is inside the other"),
        ("a=/x,a=/y", "have the name 'a'"),
        ("=/x", "NAME=PLACE"),
        ("b d=/x", "NAME=PLACE"),
    ],
)
def test_a_replica_that_makes_no_sense(root: Path, capfd: pytest.CaptureFixture[str], flag: str, says: str) -> None:
    """It is refused at the start, by the flag's name."""
    assert main(["--root", str(root), "--replica", flag.format(root=root), "--listen", "none"]) == 2
    said = capfd.readouterr().err
    assert "--replica" in said and says in said
