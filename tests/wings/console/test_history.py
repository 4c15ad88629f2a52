"""The saves of a run as the plots have them, and how pages say numbers."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from holdfast_formats.disk.manifests import Extent, TensorEntry
from holdfast_formats.rest import bodies, columns
from holdfast_formats.rest.measurements import FirstNonFinite, RunSummary
from holdfast_service.wings.console import formatting, history, manifest_view
from holdfast_service.wings.console.manifest_view import TensorLine


def checkpoint(step: int, **changes: object) -> bodies.CheckpointInfo:
    """A verified checkpoint."""
    stated = {
        "run": "r",
        "step": step,
        "attempt": 1,
        "created": f"2030-01-01T00:00:{step:02}Z",
        "world": 1,
        "groups": ["model"],
    }
    made = {"tensors": 1, "files": 1, "bytes": 1000, "metrics": {}, "verified": True}
    return bodies.CheckpointInfo.model_validate(stated | made | changes)


def a_round(step: int, state: str, **changes: object) -> bodies.Round:
    """A round that was opened a second before it ended."""
    times = {"opened": f"2030-01-01T00:00:{step:02}Z", "ended": f"2030-01-01T00:00:{step + 1:02}Z"}
    stated = {
        "id": step,
        "run": "r",
        "step": step,
        "attempt": 1,
        "world": 1,
        "state": state,
        "sealed": 1,
        "code": None,
        "detail": None,
    }
    return bodies.Round.model_validate(stated | times | changes)


def test_what_became_of_each_save() -> None:
    """Every state of a checkpoint and of a round has its lane; what is gone without a word of why was removed."""
    checkpoints = [
        checkpoint(1),
        checkpoint(2, verified=False),
        checkpoint(3, healthy=False),
        checkpoint(4, damage={"code": "corrupt-extent"}),
        checkpoint(5, pinned=True),
        checkpoint(6, abandoned=True, pinned=True),
    ]
    rounds = [a_round(step, "committed") for step in range(1, 8)]
    rounds += [a_round(8, "dropped", code="generation-dropped"), a_round(9, "aborted"), a_round(10, "sealed", ended=None)]
    found = history.saves(checkpoints, rounds)
    outcomes = {save["step"]: save["outcome"] for save in found}
    standing = ["verified", "committed", "unhealthy", "damaged", "pinned", "abandoned"]
    assert [outcomes[step] for step in range(1, 11)] == [*standing, "removed", "dropped", "aborted", "under way"]
    assert set(outcomes.values()) == set(history.OUTCOMES)
    assert [save["at"] for save in found] == sorted(save["at"] for save in found)


@pytest.mark.parametrize(
    ("steps", "complete", "outcomes"),
    [
        # Two rounds committed the step: the later one is what stands there, the earlier one's checkpoint is gone.
        ((2, 2), False, [(2, "removed"), (2, "verified")]),
        # A run that keeps its newest checkpoints alone has removed all older ones: they stay on its timeline.
        ((1, 5), True, [(1, "removed"), (5, "verified")]),
    ],
)
def test_what_does_not_stand_any_more_was_removed(
    steps: tuple[int, int], complete: bool, outcomes: list[tuple[int, str]]
) -> None:
    rounds = [a_round(number, "committed").model_copy(update={"step": step}) for number, step in enumerate(steps, 2)]
    found = history.saves([checkpoint(steps[-1])], rounds, complete=complete)
    assert [(save["step"], save["outcome"]) for save in found] == outcomes


def test_columns_of_saves() -> None:
    """One value of each list for a save; of a metric that a checkpoint has not, none."""
    made = [checkpoint(1, metrics={"loss": 2.0}), checkpoint(2, metrics={"loss": 1.0, "acc": 0.5}), checkpoint(3)]
    found = history.columns(history.saves(made, []))
    assert (found["step"], found["outcome"]) == ([1, 2, 3], ["verified"] * 3)
    assert found["metrics"] == {"acc": [None, 0.5, None], "loss": [2.0, 1.0, None]}
    assert history.columns([]) == {"metrics": {}}


def test_measurements_of_a_save() -> None:
    """Durable is the sum of the phases where they were measured, else from opening to end; the rate is of writing alone."""
    phases = {"stall_s": 0.1, "stage_s": 1.0, "queue_s": 0.5, "write_s": 2.0, "commit_s": 0.5, "bytes": 4000.0}
    measured = a_round(1, "committed", measured=phases | {"disk_bytes_per_second": 3000.0})
    plain = a_round(2, "committed")
    one, two = history.saves([checkpoint(1), checkpoint(2)], [measured, plain])
    assert (one["stall"], one["durable"], one["rate"], one["limit"]) == (0.1, 4.0, 2000.0, 3000.0)
    assert (two["stall"], two["durable"], two["rate"], two["bytes"]) == (None, 1.0, None, 1000)


def test_saves_older_than_what_was_asked_for_are_not_removed() -> None:
    """A committed round of a step below the oldest checkpoint listed says nothing about whether it is still there."""
    found = history.saves([checkpoint(5)], [a_round(1, "committed"), a_round(5, "committed")])
    assert [save["step"] for save in found] == [5]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0\u00a0s"),
        (0.00038, "380\u00a0µs"),
        (0.0123, "12.3\u00a0ms"),
        (1.44, "1.44\u00a0s"),
        (200, "3\u00a0min 20\u00a0s"),
        (7500, "2\u00a0h 5\u00a0min"),
        (273600, "3\u00a0d 4\u00a0h"),
    ],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    """Two units at most, the larger first; no line ends between a number and its unit."""
    assert formatting.seconds_text(seconds) == text
    assert formatting.seconds(seconds).startswith(f'<span title="{seconds:.6g} seconds">')


def test_numbers_have_their_exact_value() -> None:
    """What is rounded for the eye says the exact value on a longer look; what is unknown says that."""
    assert formatting.size(1234567) == '<span title="1\u202f234\u202f567 bytes">1.2\u00a0MB</span>'
    assert formatting.percent(0.0123) == '<span title="0.0123">1.23 %</span>'
    assert (
        formatting.number(None)
        == formatting.seconds(None)
        == formatting.size(None)
        == formatting.when(None)
        == formatting.NONE
    )


def test_prose_has_what_is_to_be_typed_as_code() -> None:
    """Backquotes make code, and nothing makes markup."""
    assert formatting.prose("use `a <b>`, not <i>") == "use <code>a &lt;b&gt;</code>, not &lt;i&gt;"


def test_moments() -> None:
    """Ages, with the moment itself beside; what is no moment stays text and is escaped."""
    then = (datetime.now(timezone.utc) - timedelta(hours=5)).isoformat()
    assert formatting.when(then) == f'<time datetime="{then}" title="{then}">5 h ago</time>'.replace("+", "+")
    assert formatting.when("<now>") == "&lt;now&gt;"


def test_stripes_are_the_rows_that_each_rank_held() -> None:
    """Rows that one axis shared out are cut as torch cuts them; everything else is one piece, and none is left out."""
    entry = TensorEntry("F32", (10, 4), "f", 40, (Extent(0, 160, "0" * 16),), "dp=Shard(dim=0), tp=Replicate()")
    cut = manifest_view.stripes(TensorLine("model", "w", entry, None), {"dp": 4, "tp": 2}, 200, {entry.placement: 3})
    assert [stripe.who for stripe in cut] == ["dp=0", "dp=1", "dp=2", "dp=3"]
    assert [round(stripe.width * 200 / 16) for stripe in cut] == [3, 3, 3, 1]
    assert cut[0].start == 0.2
    columns = TensorEntry("F32", (10, 4), "f", 40, entry.extents, "dp=Shard(dim=1)")
    assert len(manifest_view.stripes(TensorLine("model", "w", columns, None), {"dp": 2}, 200, {columns.placement: 0})) == 1


def test_marks() -> None:
    """Each step from which training was resumed once, by step, and where NaN began."""
    resumed = [
        checkpoint(step, attempt=attempt, restored=restored)
        for step, attempt, restored in ((10, 1, None), (20, 2, 10), (30, 2, 10), (40, 3, 30), (50, 4, 30))
    ]
    assert history.marks(resumed, None) == [{"step": 10, "what": "resumed from"}, {"step": 30, "what": "resumed from"}]
    assert history.marks([], FirstNonFinite(step=7, nan=1)) == [{"step": 7, "what": "NaN from"}]


def growing(**more: Any) -> RunSummary:
    known = {name: None for name, field in RunSummary.model_fields.items() if field.is_required()}
    figures = {
        "run": "r",
        "attempt": 1,
        "checkpoints": 5,
        "bytes": 500,
        "free_bytes": 1000,
        "saves": 5,
        "failed": 0,
        "dropped": 0,
    }
    return RunSummary(**(known | figures | {"life": "training", "interval_s": 60.0} | more))


def stored(outcomes: list[str]) -> list[dict[str, Any]]:
    return [{"outcome": outcome, "bytes": 100} for outcome in outcomes]


def test_when_storage_is_full() -> None:
    """From the newest saves and what is left; nothing where that says little."""
    five = stored(["verified"] * 5)
    assert history.full_in(growing(), five) == 600.0
    assert history.full_in(growing(quota_bytes=700), five) == 120.0
    assert history.full_in(growing(), five[:4]) is None
    assert history.full_in(growing(), stored(["removed"]) + five) is None
    assert history.full_in(growing(life="finished"), five) is None
    assert history.full_in(growing(interval_s=None), five) is None


def test_a_list_shows_what_it_knows() -> None:
    """A column without a value in any row is left out, but for the first; a long name in a link is cut in the middle."""
    listing = columns.Listing[dict[str, Any]](
        (
            columns.Column("Of", lambda row: columns.checkpoint(row["run"], 5)),
            columns.Column("Why", "why"),
            columns.Column("Node", "node"),
        )
    )
    long = "a" * 60
    shown = formatting.table(listing, [{"run": long, "why": None, "node": None}, {"run": "b", "why": "", "node": "n1"}])
    assert [one.heading for one in shown.columns] == ["Of", "Node"]
    assert [row[1] for row in shown.rows] == [formatting.NONE, "n1"]
    assert f'class="cut" href="/runs/{long}/checkpoints/5" title="{long}@5"' in shown.rows[0][0]
    assert shown.rows[1][0] == '<a href="/runs/b/checkpoints/5">b@5</a>'
    assert [one.heading for one in formatting.table(listing, []).columns] == ["Of", "Why", "Node"]
