"""E2: what any engine saves, every other one restores with equal whole tensors, and so do FSDP2 and one process."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.resuming import end, start

SCRIPT = "tests.integrations.deepspeed.worlds"
FULL = ["0-fp32", "1-fp32", "2-fp32", "3-fp32"]
HALF = ["1-bf16", "2-bf16", "3-bf16", "1-bf16-accumulated"]


def run(actions: list[str], work: Path, world: int) -> list[str]:
    """The lines of the readings that were right."""
    ranks = start(SCRIPT, actions, work, world)
    try:
        for rank in ranks:
            rank.wait(timeout=1200)
        told = "\n".join(path.read_text()[-3000:] for path in work.glob("output-*.txt"))
        assert all(rank.returncode == 0 for rank in ranks), told
    finally:
        end(ranks)
    return (work / "done.txt").read_text().splitlines() if (work / "done.txt").exists() else []


def test_any_stage_reads_any_other(tmp_path: Path) -> None:
    """Two ranks save with every stage, and with FSDP2; other stages, one rank, and one process without DeepSpeed read it."""
    made = [f"make:{kind}:run-{kind}" for kind in [*FULL, "fsdp2", *HALF]]
    two = [("fsdp2", "3-fp32"), ("1-fp32", "3-fp32"), ("3-fp32", "1-fp32"), ("2-fp32", "0-fp32"), ("3-fp32", "fsdp2")]
    two += [
        ("1-fp32", "fsdp2"),
        ("fsdp2", "1-fp32"),
        ("1-bf16", "3-bf16"),
        ("3-bf16", "2-bf16"),
        ("2-bf16", "1-bf16-accumulated"),
    ]
    done = run([*made, *(f"read:{kind}:run-{saved}" for saved, kind in two)], tmp_path, 2)
    assert done == [f"{saved} 2 {kind}" for saved, kind in two]
    one = [("3-fp32", "3-fp32"), ("1-fp32", "plain"), ("3-fp32", "plain"), ("fsdp2", "2-fp32"), ("3-bf16", "1-bf16")]
    done = run([*(f"read:{kind}:run-{saved}" for saved, kind in one), "make:plain:run-plain"], tmp_path, 1)
    assert done[len(two) :] == [f"{saved} 1 {kind}" for saved, kind in one]
    back = [("plain", "3-fp32"), ("plain", "1-fp32"), ("plain", "fsdp2")]
    done = run([f"read:{kind}:run-plain" for _, kind in back], tmp_path, 2)
    assert done[len(two) + len(one) :] == [f"{saved} 2 {kind}" for saved, kind in back]
