"""`holdfast keep`, `pin`, `unpin`, `label` and `rm` against a real service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from holdfast.commands.retention import parse_best, parse_bytes, parse_duration
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast_formats.errors import InvalidRequest, PreconditionFailed, StorageFailed
from holdfast_formats.rest.retention import Best, Preview, RetentionPolicy
from holdfast_service.control.database.schema import CheckpointRow
from tests.checkpoints import build_root
from tests.control.published import mark_verified
from tests.kit.commands import call, call_json
from tests.serving import Served, served


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A run of three checkpoints, all verified, which HOLDFAST_URL leads to."""
    build_root(tmp_path, {"tiny": (5, 10, 15)})
    with served(tmp_path) as running:
        for step in (5, 10, 15):
            mark_verified(running.services.control.catalog, "tiny", step)
        monkeypatch.setenv("HOLDFAST_URL", running.url)
        monkeypatch.setenv("COLUMNS", "250")
        yield running


def steps(service: Served) -> list[int]:
    assert service.services.control.rotation.wait_until_applied()
    return [made.step for made in service.services.control.catalog.checkpoints("tiny", None, 10).items]


def test_keep_shows_what_holds(service: Served) -> None:
    """Without a rule nothing changes: every checkpoint is shown with its verdict and why."""
    result = call("keep", "tiny")
    assert result.exit_code == 0
    lines = [line.split()[:2] for line in result.stdout.splitlines()[1:4]]
    assert lines == [["15", "keep"], ["10", "keep"], ["5", "keep"]]
    assert "no rule limits what is kept" in result.stdout
    assert "the rules: everything" in result.stdout
    unknown = call("keep", "nobody", "--last", 1)
    assert unknown.exit_code == 3 and "a run that has started; `holdfast serve --keep N`" in unknown.output


def test_keep_dry_run_changes_nothing(service: Served) -> None:
    """With --dry-run the given rules are judged, for people and for programs, and not set."""
    shown = call("keep", "tiny", "--last", 1, "--every-steps", 10, "--dry-run")
    assert "remove" in shown.stdout
    assert "every 10 steps: 5 is not a multiple of 10" in shown.stdout
    seen = call_json("keep", "tiny", "--last", 1, "--dry-run")
    assert (seen["changed"], {v["step"]: v["keep"] for v in seen["verdicts"]}) == (False, {15: True, 10: False, 5: False})
    assert steps(service) == [15, 10, 5]
    assert call("keep", "tiny", "--all", "--dry-run").exit_code == 0
    with Api(service.url) as api:
        assert retention.policy(api, "tiny").policy == RetentionPolicy()


def test_keep_asks_before_anything_goes(service: Served) -> None:
    """A no changes nothing; --json wants --yes; a policy that removes nothing is set without a question."""
    assert call("keep", "tiny", "--last", 2, stdin="n\n").exit_code == 1
    assert call("keep", "tiny", "--last", 2, "--json").exit_code == 2
    assert steps(service) == [15, 10, 5]
    assert call("keep", "tiny", "--last", 9, "--quota", "2TB").exit_code == 0
    assert call("keep", "tiny", "--last", 2, stdin="y\n").exit_code == 0
    assert steps(service) == [15, 10]
    done = call_json("keep", "tiny", "--last", 1, "--yes")
    assert (done["changed"], done["policy"]["last"], done["policy"]["quota_bytes"]) == (True, 1, None)
    assert steps(service) == [15]
    assert call("keep", "tiny", "--all").exit_code == 0
    with Api(service.url) as api:
        assert retention.policy(api, "tiny").policy == RetentionPolicy()


def test_every_rule_arrives(service: Served) -> None:
    """Each option is one rule of the policy that the service then has."""
    given = ["--last", 9, "--every-steps", 5, "--steps-apart", 6, "--every", "6h", "--within", "3d", "--step", 5]
    result = call("keep", "tiny", *given, "--best", "loss:3", "--best", "accuracy:2:max", "--quota", "1.5GiB")
    assert result.exit_code == 0, result.stderr
    assert "best loss:3, best accuracy:2:max" in result.stdout and "step 5" in result.stdout
    with Api(service.url) as api:
        assert retention.policy(api, "tiny").policy == RetentionPolicy(
            last=9,
            every_steps=5,
            steps_apart=6,
            every_seconds=21_600,
            within_seconds=259_200,
            steps=(5,),
            best=(Best(metric="loss", count=3), Best(metric="accuracy", mode="max", count=2)),
            quota_bytes=3 * 2**29,
        )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--last", 0],
        ["--every", "6"],
        ["--within", "soon"],
        ["--best", "loss"],
        ["--best", "loss:0"],
        ["--quota", "2 apples"],
        ["--all", "--last", 3],
    ],
)
def test_wrong_rules_are_refused(service: Served, arguments: list[object]) -> None:
    """A rule that cannot be is named, with exit status 2, and nothing changes."""
    result = call("keep", "tiny", *arguments)
    assert result.exit_code == 2
    assert "invalid-request" in result.stderr
    assert steps(service) == [15, 10, 5]


def test_measures_are_read() -> None:
    """Times, bytes and metrics as people write them."""
    assert [parse_duration(text) for text in ("30s", "10min", "1.5 h", "1d", "2w")] == [30, 600, 5400, 86_400, 1_209_600]
    assert [parse_bytes(text) for text in ("7", "500GB", "2tb", "1KiB")] == [7, 500 * 10**9, 2 * 10**12, 1024]
    assert parse_best("val:loss:3:min") == Best(metric="val:loss", count=3)
    assert parse_best("loss:3") == Best(metric="loss", count=3)
    for parse in (parse_duration, parse_bytes, parse_best):
        with pytest.raises(InvalidRequest):
            parse("-1x")


def test_pin_unpin_label(service: Served) -> None:
    """Marks keep a checkpoint from every rule and from rm, until they are taken away; repeating is harmless."""
    for _ in range(2):
        assert call("pin", "tiny@5").exit_code == 0
        assert call_json("label", "tiny@10", "best") == {"run": "tiny", "step": 10, "label": "best", "removed": False}
    assert call("keep", "tiny", "--last", 1, "--yes").exit_code == 0
    assert steps(service) == [15, 10, 5]
    for name, mend in (("tiny@5", "holdfast unpin tiny@5"), ("tiny@10", "holdfast label tiny@10 best --remove")):
        refused = call("rm", name, "--yes")
        assert (refused.exit_code, mend in refused.stderr) == (4, True)
    assert call("label", "tiny@10", "best", "--remove").exit_code == 0
    assert steps(service) == [15, 5]
    assert call_json("unpin", "tiny@5")["pinned"] is False
    assert steps(service) == [15]
    assert call("pin", "tiny").exit_code == 2
    assert call("pin", "tiny@6").exit_code == 3
    assert call("label", "tiny@15", "a b").exit_code == 2


def test_rm_the_newest_verified(service: Served) -> None:
    """It is refused before anybody is asked, unless it is named what is forced; --dry-run removes nothing."""
    refused = call("rm", "tiny@15", "--yes")
    assert refused.exit_code == 4
    assert "--force newest-verified" in refused.stderr
    assert call("rm", "tiny@15", "--yes", "--force", "yes").exit_code == 2
    assert call_json("rm", "tiny@15", "--dry-run", "--force", "newest-verified")["would remove"]["step"] == 15
    assert "would remove" in call("rm", "tiny@10", "--dry-run").stdout
    assert steps(service) == [15, 10, 5]
    assert call("rm", "tiny@15", "--yes", "--force", "newest-verified").exit_code == 0
    assert steps(service) == [10, 5]


def test_rm_the_newest_healthy(service: Served) -> None:
    """Where what is newer is unhealthy, it has to be forced by its own name."""
    with service.services.control.catalog.database.write() as session:
        session.execute(update(CheckpointRow).where(CheckpointRow.step == 15).values(healthy=False))
    refused = call("rm", "tiny@10", "--yes", "--force", "newest-verified")
    assert (refused.exit_code, "--force newest-healthy" in refused.stderr) == (4, True)
    assert steps(service) == [15, 10, 5]
    assert call("rm", "tiny@10", "--yes", "--force", "newest-healthy").exit_code == 0
    assert steps(service) == [15, 5]


def test_what_was_checked_is_said(service: Served, tmp_path: Path) -> None:
    """`show` and `ls` say which checkpoints nobody has read back, what was found of the others, and whom to ask."""
    with service.services.control.catalog.database.write() as session:
        of = update(CheckpointRow).where(CheckpointRow.run == "tiny")
        session.execute(of.where(CheckpointRow.step == 5).values(verified=False))
        session.execute(
            of.where(CheckpointRow.step == 10).values(checked="2020-01-01T00:00:00Z", check={"layouts": ["tp=2"]})
        )
        session.execute(of.where(CheckpointRow.step == 15).values(healthy=False))
    shown = {step: call("show", f"tiny@{step}").stdout for step in (5, 10, 15)}
    assert "not checked yet" in shown[5] and "sound" not in shown[5]
    assert "sound, " in shown[10] and "restore tested in tp=2" in shown[10]
    assert "sound, but with new NaN or infinities" in shown[15]
    assert [call_json("show", f"tiny@{step}")["verified"] for step in (5, 10)] == [False, True]
    states = {line.split()[0]: "committed (not checked yet)" in line for line in call("ls", "tiny").stdout.splitlines()[1:]}
    assert states == {"15": False, "10": False, "5": True}
    assert "only a service records checks" in call("show", "tiny@5", "--root", tmp_path).stdout
    assert "not checked yet" not in call("ls", "tiny", "--root", tmp_path).stdout


def test_a_change_in_between_is_not_overwritten(service: Served) -> None:
    """A policy that somebody else changed since it was read is left as it is."""
    with Api(service.url) as api:
        stale = retention.policy(api, "tiny")
        retention.set_policy(api, "tiny", RetentionPolicy(last=7), stale.tag)
        with pytest.raises(PreconditionFailed):
            retention.set_policy(api, "tiny", RetentionPolicy(last=1), stale.tag)
        assert retention.policy(api, "tiny").policy.last == 7
        assert isinstance(retention.preview(api, "tiny"), Preview)
        with pytest.raises(StorageFailed, match="invalid answer"):
            api.parsed(api.request("GET", "/v1/runs").content, Preview)
