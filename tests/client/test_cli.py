"""The command line, on bare directories and against the real service: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from holdfast import Api
from holdfast.commands import events, serve
from holdfast.read.checkpoint_index import parse_target
from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import DirectorySource
from holdfast.terminal import console
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint
from tests.checkpoints import build, build_root, flip, varied_arrays
from tests.control.published import mark_verified
from tests.kit.commands import call, call_json
from tests.serving import Served, served


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_service: None) -> Path:
    """A root with two runs, and a working directory with nothing in it."""
    made = tmp_path / "root"
    build_root(made, {"tiny": (5, 10), "other": (1,)})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return made


@pytest.fixture
def service(root: Path) -> Iterator[Served]:
    with served(root) as running:
        yield running


def step_5(root: Path) -> Path:
    return root / naming.checkpoint_path("tiny", 5)


def shard(root: Path, group: str) -> Path:
    return sorted(step_5(root).glob(f"{group}*.safetensors"))[-1]


def test_ls_runs(place: list[str]) -> None:
    """Runs are listed for people and for programs."""
    result = call("ls", *place)
    assert result.exit_code == 0
    assert [line.split()[:3] for line in result.stdout.splitlines()[1:]] == [["other", "1", "1"], ["tiny", "10", "2"]]
    assert [(run["name"], run["newest"]) for run in call_json("ls", *place)] == [("other", 1), ("tiny", 10)]


def test_ls_chooses_among_checkpoints(service: Served) -> None:
    """By label, state and time, from a service."""
    mark_verified(service.services.control.catalog, "tiny", 5)
    with Api(service.url) as api:
        api.request("PUT", "/v1/runs/tiny/checkpoints/10/labels/good")
        api.request("PUT", "/v1/runs/tiny/checkpoints/10/pin")
    url = ("--url", service.url)
    assert [made["step"] for made in call_json("ls", "tiny", "--label", "good", *url)] == [10]
    assert [made["step"] for made in call_json("ls", "tiny", "--state", "verified", *url)] == [5]
    assert call_json("ls", "tiny", "--since", "2999-01-01", *url) == []
    shown = call("ls", "tiny", *url).stdout.splitlines()
    assert "committed" in shown[1] and shown[1].split()[-2:] == ["pinned", "good"]
    assert "No such checkpoints" in call("ls", "tiny", "--since", "2999-01-01", *url).stdout


def test_ls_chooses_by_time_alone_without_a_service(root: Path) -> None:
    """Labels and states are a service's to know; a time that is none, and filters without a run, are refused."""
    assert [made["step"] for made in call_json("ls", "tiny", "--since", "2000-01-01", "--root", root)] == [10, 5]
    assert call_json("ls", "tiny", "--since", "2999-01-01", "--root", root) == []
    for wrong in (("tiny", "--state", "verified"), ("tiny", "--since", "last week"), ("--since", "3d")):
        assert call_json("ls", *wrong, "--root", root)["code"] == "invalid-request"


def test_ls_checkpoints(place: list[str]) -> None:
    """A run's checkpoints come newest first, with age, size, groups and metrics."""
    result = call("ls", "tiny", *place)
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["STEP", "10", "5"]
    assert "model optim extra" in result.stdout
    assert "loss=2.5" in result.stdout
    assert [made["step"] for made in call_json("ls", "tiny", *place)] == [10, 5]


def test_ls_says_what_is_damaged(root: Path) -> None:
    """Over a service, a checkpoint that cannot be read stays in the list, as damaged, with the reason beside it."""
    flip(step_5(root) / naming.MANIFEST, 9)
    with served(root) as running:
        place = ["--url", running.url]
        result = call("ls", "tiny", *place)
        rows = [line.split() for line in result.stdout.splitlines()]
        assert [row[0] for row in rows] == ["STEP", "10", "5"]
        assert "committed" in rows[1] and "damaged" in rows[2]
        assert "step 5 is damaged" in result.stderr
        assert [made["state"] for made in call_json("ls", "tiny", *place)] == ["committed", "damaged"]
        refused = call("verify", "tiny@5", *place)
        assert refused.exit_code == 5 and naming.MANIFEST in refused.stdout


def test_ls_unknown_run(place: list[str]) -> None:
    """An unknown run ends with 3; the problem is on stderr, or as JSON on stdout."""
    result = call("ls", "nope", *place)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "no-such-run" in result.stderr
    as_json = call("ls", "nope", *place, "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)["code"]) == (3, "no-such-run")
    for command in (("ls", "tiyn"), ("show", "tiyn@5"), ("verify", "tiyn")):
        assert "did you mean tiny?" in call(*command, *place).stderr


def test_ls_names_what_it_cannot_read(root: Path) -> None:
    """A checkpoint with a broken manifest is left out of the list, and said so."""
    flip(step_5(root) / naming.MANIFEST, 9)
    result = call("ls", "tiny", "--root", root)
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["STEP", "10"]
    assert "unreadable" in result.stderr


def test_show(place: list[str]) -> None:
    """A checkpoint's origin, files, tensors and aliases are shown."""
    result = call("show", "tiny@5", *place)
    assert result.exit_code == 0
    for part in ("tiny@5", "attempt 1, 2 ranks, mesh dp 2", "layers.0.q.weight/exp_avg", "F64", "[24, 40]"):
        assert part in result.stdout
    assert "tied to embed.weight" in result.stdout
    shown = call_json("show", "tiny", *place)
    assert (shown["step"], len(shown["tensors"]), shown["aliases"]["model"]) == (10, 8, {"lm_head.weight": "embed.weight"})


def test_show_a_directory(root: Path) -> None:
    """A checkpoint's directory is a name for it, wherever it stands."""
    assert call_json("show", step_5(root))["step"] == 5


def test_verify_intact(place: list[str]) -> None:
    """An intact checkpoint ends with 0, and says how much was checked."""
    result = call("verify", "tiny@latest", *place)
    assert result.exit_code == 0
    assert "intact" in result.stdout
    checked = call_json("verify", "tiny@latest", *place)
    assert (checked["intact"], checked["damages"]) == (True, [])
    assert checked["bytes"] > 10_000


def test_verify_damaged(live_place: list[str], root: Path) -> None:
    """Damage ends with 5, and every finding names file and tensor."""
    path = shard(root, "optim")
    flip(path, path.stat().st_size - 1)
    flip(step_5(root) / "config.json", 0)
    result = call("verify", "tiny@5", *live_place)
    assert result.exit_code == 5
    assert path.name in result.stdout
    assert "config.json" in result.stdout
    assert "`holdfast repair" in result.stdout, "what to do next"
    told = call_json("verify", "tiny@5", *live_place)
    damages = told["damages"]
    assert "repair" in told["hint"]
    assert [damage["file"] for damage in damages] == ["config.json", path.name]
    assert damages[1]["tensor"] is not None


def test_verify_says_what_was_repaired(service: Served) -> None:
    """Damage that the service has repaired is told, and not that all was intact; of this checkpoint alone."""
    url = ["--url", service.url]
    detail = {"file": "model.safetensors", "source": "replica nas"}
    text = "model.safetensors of step 5 was repaired from replica nas"
    service.services.control.events.add("checkpoint-repaired", text, "tiny", 5, "warning", **detail)
    service.services.control.events.add("checkpoint-repaired", "another one", "tiny", 10, "warning", **detail)
    service.services.control.events.add("checkpoint-repaired", "its copy", "tiny", 5, "warning", replica="nas", **detail)
    result = call("verify", "tiny@5", *url)
    assert "repaired" in result.stdout and text in result.stdout and "intact" not in result.stdout
    assert "another" not in result.stdout and "its copy" not in result.stdout
    assert [event["text"] for event in call_json("verify", "tiny@5", *url)["repaired"]] == [text]


@pytest.mark.parametrize("name", [naming.COMMIT, naming.MANIFEST])
def test_verify_without_commit_or_manifest(live_place: list[str], root: Path, name: str) -> None:
    """A checkpoint without COMMIT or manifest is damaged, and the file is named."""
    (step_5(root) / name).unlink()
    result = call("verify", "tiny@5", *live_place)
    assert result.exit_code == 5
    assert name in result.stdout


def test_what_is_no_checkpoint_is_not_damaged(tmp_path: Path) -> None:
    """A directory with neither COMMIT nor manifest never was one of ours."""
    (tmp_path / "model.safetensors").write_bytes(bytes(16))
    result = call("verify", tmp_path)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "is not a checkpoint" in result.stderr


def test_restore(place: list[str], root: Path, tmp_path: Path) -> None:
    """The copy is the same checkpoint, file by file, and verifies; parents are made."""
    out = tmp_path / "deep" / "copy"
    result = call("restore", "tiny@5", "--out", out, *place)
    assert result.exit_code == 0, result.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in step_5(root).iterdir()
    }
    with CheckpointReader.open(DirectorySource(out)) as reader:
        assert reader.verify() == []
    with (
        safe_open(str(shard(root, "model")), "np") as original,
        safe_open(str(out / shard(root, "model").name), "np") as copy,
    ):
        assert list(original.keys()) == list(copy.keys())


def test_restore_groups(place: list[str], root: Path, tmp_path: Path) -> None:
    """With --group the copy holds these groups, their indexes and the assets, and does not claim to be a checkpoint."""
    out = tmp_path / "weights"
    restored = call_json("restore", "tiny@5", "--out", out, "--group", "model", *place)
    names = {path.name for path in out.iterdir()}
    model = {path.name for path in step_5(root).glob("model*")}
    assert names == model | {"config.json", "empty.txt"}
    assert (restored["files"], restored["committed"]) == (len(names), False)
    assert call("restore", "tiny@5", "--out", tmp_path / "x", "--group", "nope", *place).exit_code == 3
    assert not (tmp_path / "x").exists()


def test_restore_hands_nothing_over_when_damaged(live_place: list[str], root: Path, tmp_path: Path) -> None:
    """When anything is damaged, restore ends with 5, names it, and leaves nothing behind."""
    path = shard(root, "optim")
    flip(path, path.stat().st_size - 1)
    out = tmp_path / "copy"
    result = call("restore", "tiny@5", "--out", out, *live_place)
    assert result.exit_code == 5
    assert path.name in result.stderr
    assert not out.exists()
    out.mkdir()
    assert call("restore", "tiny@5", "--out", out, *live_place).exit_code == 5
    assert list(out.iterdir()) == []


def test_restore_spares_what_is_there(root: Path, tmp_path: Path) -> None:
    """A directory that is not empty is refused and stays as it is."""
    (tmp_path / "notes.txt").write_text("mine")
    result = call("restore", "tiny@5", "--out", tmp_path, "--root", root)
    assert result.exit_code == 2
    assert "not empty" in result.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "config.json").exists()


def test_rm(service: Served) -> None:
    """rm asks first; a no, or no answer, removes nothing; --yes does not ask."""
    refused = call("rm", "tiny@5", "--url", service.url, stdin="n\n")
    assert refused.exit_code == 1
    assert step_5(service.root).is_dir()
    assert call("rm", "tiny@5", "--url", service.url, stdin="y\n").exit_code == 0
    assert not step_5(service.root).exists()
    assert call_json("rm", "tiny@10", "--yes", "--url", service.url)["removed"]["step"] == 10
    assert call("rm", "tiny@10", "--yes", "--url", service.url).exit_code == 3


def test_rm_wants_a_step_and_a_service(service: Served) -> None:
    """What is removed is never guessed, and --json never asks; a run without a step is the whole run, which comes back."""
    for arguments in (["rm", "tiny@latest", "--yes"], ["rm", "tiny@5", "--json"], ["rm", "tiny", "--json"]):
        assert call(*arguments, "--url", service.url).exit_code == 2
    assert call("rm", "tiny", "--force", "newest-verified", "--url", service.url).exit_code == 2
    assert call("rm", "tiny", "--url", service.url, stdin="n\n").exit_code == 1
    assert step_5(service.root).is_dir()
    assert call_json("rm", "tiny", "--yes", "--url", service.url)["deleted"]["checkpoints"] == 2
    assert not step_5(service.root).is_dir()
    assert call("undelete", "tiny", "--url", service.url).exit_code == 0
    assert step_5(service.root).is_dir()
    assert call("rm", "tiny@5", "--yes", "--url", "http://127.0.0.1:9").exit_code == 6


def test_where_checkpoints_are_looked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no option: HOLDFAST_URL, else the service that answers, else ./holdfast-data, else an error with advice."""
    nowhere = call("ls")
    assert nowhere.exit_code == 6
    assert "holdfast serve" in nowhere.stderr
    Path("holdfast-data").symlink_to(root)
    assert [run["name"] for run in call_json("ls")] == ["other", "tiny"]
    with served(root.parent / "elsewhere") as empty:
        monkeypatch.setattr("holdfast.config.DEFAULT_URL", empty.url)
        assert call_json("ls") == []
    monkeypatch.setenv("HOLDFAST_URL", "http://127.0.0.1:9")
    assert call("ls").exit_code == 6  # the address that was given, and no other


def test_both_places_at_once(root: Path) -> None:
    """--root and --url together are refused."""
    assert call("ls", "--root", root, "--url", "http://127.0.0.1:9").exit_code == 2
    assert call("ls", "--root", root / "nope").exit_code == 6


def test_targets(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RUN@STEP, RUN@latest, RUN and directories; anything else is refused."""
    assert parse_target("tiny@5") == ("tiny", 5, None, False, None, None)
    assert parse_target("tiny@latest") == parse_target("tiny") == ("tiny", None, None, False, None, None)
    assert parse_target("tiny@latest-healthy") == ("tiny", None, None, True, None, None)
    assert parse_target("tiny@best") == ("tiny", None, None, False, (None, "min"), None)
    assert parse_target("tiny@best:loss") == ("tiny", None, None, False, ("loss", "min"), None)
    assert parse_target("tiny@best:eval:acc:max").best == ("eval:acc", "max")
    assert parse_target(str(step_5(root))).directory == step_5(root)
    below = parse_target("s3://bucket/team/tiny@5")
    assert below[:2] == ("tiny", 5) and below.root is not None and below.root.label == "s3://bucket/team"
    assert parse_target("s3://bucket/tiny@latest").root is not None
    monkeypatch.chdir(step_5(root).parent)
    assert parse_target("step-00000005").directory == Path("step-00000005")
    for wrong in ("tiny@", "tiny@x", "@5", "tiny@5@6", "tiny@-1", "tiny@best:", "tiny@bestloss"):
        with pytest.raises(InvalidRequest):
            parse_target(wrong)
    with pytest.raises(NoSuchCheckpoint):
        parse_target("./nope")


def test_serve_becomes_the_daemon(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """serve replaces itself by `python -m holdfast_service` and hands its flags on as they are, --help too."""
    replaced: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: replaced.append([path, *arguments]))
    given = ["--root", "data", "--listen", "0.0.0.0:1", "--keep", "3", "--exit-when-idle", "9", "--help"]
    assert call("serve").exit_code == 0
    assert call("serve", *given).exit_code == 0
    start = [sys.executable, sys.executable, "-m", "holdfast_service"]
    assert replaced == [start, start + given]


def test_serve_without_its_dependencies(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the daemon's dependencies are missing, serve names them and says how to get them."""
    monkeypatch.setattr(serve, "_EXTRAS", ("no_such_module",))
    result = call("serve")
    assert result.exit_code == 2
    assert "no_such_module" in result.stderr
    assert "[service]" in result.stderr


def test_help_documents_exit_statuses() -> None:
    """Every command's help says where its exit statuses are explained."""
    for command in ([], *([name] for name in ("ls", "show", "verify", "restore", "rm", "doctor", "demo"))):
        result = call(*command, "--help")
        assert result.exit_code == 0
        assert "holdfast help exit" in " ".join(result.stdout.split())
    assert call("--version").stdout.strip()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (5_000_000_000, "5.0 GB"), (10**19, "10000.0 PB")]
)
def test_human_bytes(count: int, text: str) -> None:
    """Sizes are in decimal units."""
    assert console.human_bytes(count) == text


def test_human_age() -> None:
    """Ages are in the unit that fits; what is not a time is shown as it is."""
    now = datetime(2026, 1, 2, 12, 0, tzinfo=timezone.utc)
    assert console.human_age("2026-01-02T11:59:30Z", now) == "30 s ago"
    assert console.human_age("2026-01-02T09:00:00+00:00", now) == "3 h ago"
    assert console.human_age("2025-12-23T12:00:00", now) == "10 d ago"
    assert console.human_age("2026-01-02T15:00:00Z", now) == "in 3 h"
    assert console.human_age("yesterday", now) == "yesterday"


class TestDiff:
    """`holdfast diff`."""

    def test_two_steps(self, place: list[str], root: Path) -> None:
        """Steps of one run, the second as a number: here they hold the same bytes."""
        result = call("diff", "tiny@5", "10", *place)
        assert result.exit_code == 0, result.output
        assert "tiny@5 and tiny@10: 8 equal" in result.output

    def test_changed_tensors_come_with_their_distance(self, root: Path) -> None:
        """The most changed one first; JSON has all of them."""
        arrays = {group: dict(held) for group, held in varied_arrays().items()}
        arrays["model"]["layers.0.q.weight"] = arrays["model"]["layers.0.q.weight"] * np.float32(3)
        arrays["model"]["layers.0.scale"] = np.zeros(2, np.float32)
        build(root / naming.checkpoint_path("tiny", 20), arrays, step=20)
        result = call("diff", "tiny@10", "tiny@20", "--root", root)
        assert result.exit_code == 0, result.output
        rows = result.output.splitlines()
        assert "layers.0.q.weight" in rows[-2] and "\t2\t" in rows[-2]
        assert "layers.0.scale" in rows[-1] and "reshaped: [] → [2]" in rows[-1]
        made = json.loads(call("diff", "tiny@10", "tiny@20", "--root", root, "--json").output)
        assert made["tensors"] == {"equal": 6, "changed": 1, "reshaped": 1}
        assert made["relative"] == pytest.approx(2.0)
        fast = json.loads(call("diff", "tiny@10", "tiny@20", "--root", root, "--fast", "--json", "--group", "model").output)
        assert (fast["exact"], fast["relative"], fast["tensors"]["changed"]) == (False, None, 1)
        assert call("diff", "tiny@10", "tiny@20", "--root", root, "--most", 1).output.endswith("or use --json for all\n")

    def test_tensors_with_nan_come_first_and_are_counted(self, root: Path) -> None:
        """Before one that has changed, and one that is of another shape; their distances are not zero, but none."""
        arrays = {group: dict(held) for group, held in varied_arrays().items()}
        arrays["model"]["layers.0.q.weight"] = arrays["model"]["layers.0.q.weight"] * np.float32(3)
        arrays["model"]["layers.0.scale"] = np.zeros(2, np.float32)
        moments = arrays["optim"]["layers.0.q.weight/exp_avg"]
        arrays["optim"]["layers.0.q.weight/exp_avg"] = np.full_like(moments, np.nan)
        build(root / naming.checkpoint_path("tiny", 20), arrays, step=20)
        rows = call("diff", "tiny@10", "tiny@20", "--root", root).output.splitlines()
        assert "; 1 with NaN or infinite values; relative change" in rows[0]
        assert [name in row for name, row in zip(("exp_avg", "q.weight", "scale"), rows[-3:], strict=True)] == [True] * 3
        assert "\t0\t" not in rows[-3]

    def test_damage_ends_it(self, root: Path) -> None:
        """What is not proven is not compared: exit status 5, the tensor named."""
        arrays = {group: dict(held) for group, held in varied_arrays(1).items()}
        built = build(root / naming.checkpoint_path("tiny", 20), arrays, step=20)
        entry = built.manifest.tensors["model"]["layers.0.q.weight"]
        flip(built.path / entry.file, entry.start + 9)
        result = call("diff", "tiny@10", "tiny@20", "--root", root)
        assert result.exit_code == 5 and "layers.0.q.weight" in result.output


def test_lines_of_events_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON leaves what is no ASCII as it is, and among that are characters that a terminal obeys."""
    events._line({"text": "a\x9b2J\u202eb"})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"text": "a\x9b2J\u202eb"} and shown.isascii()


def test_what_asks_names_the_option_where_nothing_answers(service: Served) -> None:
    """`rm` in a script says how it is told not to ask, and removes nothing; a no is a no."""
    url = ("--url", service.url)
    silent = call("rm", "tiny@5", *url)
    assert silent.exit_code == 2 and "nothing was removed" in silent.stderr and "-y (--yes)" in silent.stderr
    assert call("rm", "tiny@5", *url, stdin="n\n").exit_code == 1
    assert [made["step"] for made in call_json("ls", "tiny", *url)] == [10, 5]
    assert call("rm", "tiny@5", *url, stdin="y\n").exit_code == 0


def test_a_token_without_an_end_and_a_quota_below_use_are_warned_of(service: Served) -> None:
    """On stderr; what was asked for is done."""
    url = ("--url", service.url)
    endless, ending = call("token", "create", "a", *url), call("token", "create", "b", "--expires", "1d", *url)
    assert "never expires" in endless.stderr and "never expires" not in ending.stderr
    small, large = call("quota", "set", "*", "1kB", *url), call("quota", "set", "*", "1TB", *url)
    assert "already over the quota" in small.stderr and "over the quota" not in large.stderr
    assert small.exit_code == large.exit_code == 0
