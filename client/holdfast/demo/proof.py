"""The demo's claims, and the comparisons that prove them. Pure: journals and digests in, claims out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

KINDS = {
    "model": "weights (bf16)",
    "master": "master weights (FP32)",
    "optim": "optimizer",
    "ema": "EMA",
    "rng": "random generators",
    "scheduler": "schedule",
    "loader": "data position",
}


class Claim(NamedTuple):
    what: str
    holds: bool
    evidence: str


class LaunchRecord(NamedTuple):
    """One start of the trainer in a rank's journal: its first step, its losses by step, its staged saves."""

    restored: int
    losses: dict[int, float]
    staged: list[int]

    @property
    def step(self) -> int:
        return max(self.losses, default=self.restored)


def parse_journal(text: str) -> list[LaunchRecord]:
    """The launches in a rank's journal, without an unfinished last line, which a kill may leave."""
    launches: list[LaunchRecord] = []
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        event = json.loads(line)
        if "restored" in event:
            launches.append(LaunchRecord(event["restored"], {}, []))
        elif "loss" in event:
            launches[-1].losses[event["step"]] = float.fromhex(event["loss"])
        else:
            launches[-1].staged.append(event["staged"])
    return launches


def compare_losses(uninterrupted: Sequence[LaunchRecord], others: Sequence[LaunchRecord], what: str) -> Claim:
    """Whether every loss of `others`, rank by rank, equals the uninterrupted run's at the same step, bit for bit."""
    count = 0
    for rank, (whole, other) in enumerate(zip(uninterrupted, others, strict=True)):
        for step, loss in sorted(other.losses.items()):
            if whole.losses.get(step) != loss:
                return Claim(what, False, f"rank {rank}, step {step}: {loss!r}, uninterrupted {whole.losses.get(step)!r}")
            count += 1
    steps = sorted({step for other in others for step in other.losses})
    span = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
    return Claim(what, count > 0, f"{_count(count, 'loss', 'losses')} on {_count(len(others), 'rank')}, {span}")


def compare_states(uninterrupted: Sequence[Mapping[str, str]], resumed: Sequence[Mapping[str, str]]) -> list[Claim]:
    """A claim for each kind of state: every entry's digest on every rank is the same in both runs."""
    claims = []
    for kind, title in KINDS.items():
        pairs = [
            (f"rank {rank}: {name}", whole.get(name), other.get(name))
            for rank, (whole, other) in enumerate(zip(uninterrupted, resumed, strict=True))
            for name in sorted({*whole, *other})
            if name.startswith(f"{kind}/")
        ]
        different = [name for name, left, right in pairs if left != right]
        evidence = f"{different[0]}, and {len(different) - 1} more" if different else f"{_count(len(pairs), 'digest')} equal"
        claims.append(Claim(f"final state: {title}", bool(pairs) and not different, evidence))
    return claims


def compare_weights(trained: Mapping[str, str], loaded: Mapping[str, str]) -> Claim:
    """Whether `from_pretrained` loaded exactly the trainer's weights, bit for bit."""
    different = sorted(name for name in {*trained, *loaded} if trained.get(name) != loaded.get(name))
    evidence = f"different: {', '.join(different[:3])}" if different else f"{len(loaded)} tensors bit-equal"
    return Claim("weights by from_pretrained", bool(loaded) and not different, evidence)


def _count(number: int, word: str, words: str = "") -> str:
    return f"{number} {word if number == 1 else words or word + 's'}"
