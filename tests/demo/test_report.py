"""What the demo prints."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from holdfast.demo import report
from holdfast.demo.proof import LaunchRecord


def printed() -> Console:
    return Console(width=100, record=True, file=StringIO())


def test_a_log_is_shown_up_to_torchruns_own_report(tmp_path: Path) -> None:
    """The cause stands in the ranks' lines; what torchrun says about it afterwards would push it out of sight."""
    log = tmp_path / "log"
    noise = "E1 torch/distributed/elastic/multiprocessing/api.py] failed\n" + "boilerplate\n" * 50
    log.write_text("early\n" * 50 + "the cause\n" + noise)
    console = printed()
    report.print_log(console, log)
    text = console.export_text()
    assert "the cause" in text and str(log) in text
    assert "boilerplate" not in text


def test_generated_text_keeps_its_lines_and_loses_its_empty_end() -> None:
    """Long lines are folded at the panel's edge, trailing blanks are left out."""
    console = printed()
    report.print_text(console, "x" * 100 + "\n  y\n" + " " * 200)
    inside = [line.strip("│").rstrip() for line in console.export_text().splitlines()[1:-1]]
    assert inside == [" " + "x" * 76, " " + "x" * 24, "   y"]


def test_the_mean_loss_is_over_the_steps_that_all_ranks_finished() -> None:
    """A kill leaves one rank a step ahead; that step has no mean."""
    assert report.mean_losses([LaunchRecord(0, {1: 2.0, 2: 1.0}, []), LaunchRecord(0, {1: 4.0}, [])]) == {1: 3.0}


def test_the_losses_of_both_runs_stand_side_by_side() -> None:
    """A row for the first step, each checkpoint and the kill; a step that was done twice shows all three losses."""
    console = printed()
    whole = {step: 6.0 - step / 2 for step in range(1, 9)}
    killed = LaunchRecord(0, {step: whole[step] for step in range(1, 6)}, [4])
    resumed = LaunchRecord(4, {step: whole[step] for step in range(5, 9)}, [8])
    report.print_losses(console, 4, [[LaunchRecord(0, whole, [])]] * 2, [[killed, resumed]] * 2)
    rows = [line.split() for line in console.export_text().splitlines() if line.strip()[:1].isdigit()]
    assert [[cell for cell in row if cell[0].isdigit()] for row in rows] == [
        ["1", "5.500000", "5.500000"],
        ["4", "4.000000", "4.000000"],
        ["5", "3.500000", "3.500000", "3.500000"],
        ["8", "2.000000", "2.000000"],
    ]
    assert [" ".join(cell for cell in row if cell.isalpha()) for row in rows] == ["", "resumed from here", "killed here", ""]
