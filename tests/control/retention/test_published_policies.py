"""Other systems' published retention policies as cases: what they keep, ours keeps, and the newest one besides (I10)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from holdfast_formats.rest.retention import Best, RetentionPolicy
from holdfast_service.control.retention.policy import Candidate, decide

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


class Case(NamedTuple):
    """A published table: its steps, the policy in our words, and the steps that theirs keeps.

    `times` are seconds, one apart where there are none; `losses` are given at save, None for a save without one.
    """

    policy: dict[str, Any]
    keeps: list[int]
    steps: list[int] = list(range(5))  # noqa: RUF012 — never changed
    losses: list[float | None] = []  # noqa: RUF012
    times: list[float] = []  # noqa: RUF012
    now: float = 5.0


def lowest(count: int, keep_unmeasured: bool = False) -> tuple[Best, ...]:
    return (Best(metric="loss", count=count, keep_unmeasured=keep_unmeasured),)


UNEVEN = [0, 1, 2, 4, 5, 8, 9, 13, 14, 25]
NOON = 100 * DAY_S

# orbax-checkpoint, checkpoint_managers/preservation_policy.py and the tables of its test, at 3ff7b24a.
ORBAX = {
    "LatestN None": Case({}, [0, 1, 2, 3, 4]),
    "LatestN 3": Case({"last": 3}, [2, 3, 4]),
    "LatestN 15": Case({"last": 15}, [0, 1, 2, 3, 4]),
    "EveryNSeconds 1": Case({"every_seconds": 1}, [0, 1, 2, 3, 4]),
    "EveryNSeconds 3": Case({"every_seconds": 3}, [0, 3]),
    "EveryNSeconds 6": Case({"every_seconds": 6}, [0]),
    "EveryNSteps 1": Case({"every_steps": 1}, [0, 1, 2, 3, 4]),
    "EveryNSteps 3": Case({"every_steps": 3}, [0], [0, 1, 2, 4]),
    "EveryNSteps 3, not exact": Case({"steps_apart": 3}, [0, 4], [0, 1, 2, 4]),
    "EveryNSteps 6": Case({"every_steps": 6}, [0]),
    "EveryNSteps 3, not exact, uneven": Case({"steps_apart": 3}, [0, 4, 8, 13, 25], UNEVEN),
    "BestN None": Case({}, [0, 1, 2, 3, 4], losses=[5, None, 3, None, 7]),
    "BestN 1": Case({"best": lowest(1, True)}, [1, 2, 3], losses=[7, None, 4, None, 5]),
    "BestN 4": Case({"best": lowest(4, True)}, [0, 1, 2, 3, 4], losses=[5, None, 4, None, 7]),
    "BestN 4, measured only": Case({"best": lowest(4)}, [0, 2, 4], losses=[5, None, 4, None, 7]),
    "CustomSteps": Case({"last": 1, "steps": (0, 2, 3)}, [0, 2, 3]),
    "CustomSteps that are not there": Case({"last": 1, "steps": (14, 13)}, []),
    "AnyPreservationPolicy": Case(
        {"last": 3, "every_seconds": 3, "steps": (0, 3), "best": lowest(2, True), "every_steps": 6},
        [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11],
        [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11],
        [5, None, 4, None, 3, None, 11, None, 8, None, 12],
    ),
    **{
        f"LatestDuration {hours} h": Case(
            {"within_seconds": hours * HOUR_S}, keeps, [0, 1, 2, 3], [], [NOON - h * HOUR_S for h in (30, 25, 23, 10)], NOON
        )
        for hours, keeps in ((24, [2, 3]), (28, [1, 2, 3]), (5, []), (100, [0, 1, 2, 3]))
    },
}

# PyTorch Lightning, tests_pytorch/trainer/test_trainer.py::test_model_checkpoint_options: one save an epoch.
LIGHTNING_LOSSES: list[float | None] = [10, 9, 2.8, 5, 2.5]
LIGHTNING = {
    "save_top_k -1": Case({}, [0, 1, 2, 3, 4], losses=LIGHTNING_LOSSES),
    "save_top_k 1": Case({"best": lowest(1)}, [4], losses=LIGHTNING_LOSSES),
    "save_top_k 2": Case({"best": lowest(2)}, [2, 4], losses=LIGHTNING_LOSSES),
    "save_top_k 3": Case({"best": lowest(3)}, [2, 3, 4], losses=LIGHTNING_LOSSES),
    "save_top_k 4": Case({"best": lowest(4)}, [1, 2, 3, 4], losses=LIGHTNING_LOSSES),
    "save_top_k 1, save_last": Case({"best": lowest(1), "last": 1}, [2, 4], losses=[10, 9, 2.5, 5, 2.8]),
    # ModelCheckpoint.check_monitor_top_k compares strictly, so what only equals the worst one kept is not saved.
    "save_top_k 1, a tie": Case({"best": lowest(1)}, [1], losses=[3, 2, 2, 2, 9]),
    "save_top_k -1, every_n_train_steps 2": Case({"every_steps": 2}, [2, 4], [1, 2, 3, 4, 5]),
}

# Hugging Face Trainer, TrainingArguments.save_total_limit; with load_best_model_at_end and a limit of 5 "the four last
# checkpoints will always be retained alongside the best model", with a limit of 1 the last one and the best one.
TRANSFORMERS = {
    "save_total_limit 2": Case({"last": 2}, [400, 500], [100, 200, 300, 400, 500]),
    "save_total_limit 5, best at end": Case(
        {"last": 4, "best": lowest(1)}, [200, 500, 600, 700, 800], list(range(100, 900, 100)), [9, 1, 5, 5, 5, 5, 5, 5]
    ),
    "save_total_limit 1, best at end": Case({"last": 1, "best": lowest(1)}, [2, 4], losses=[5, 4, 1, 2, 3]),
}

# Megatron-LM, --save-retain-interval: all but those at multiples of it "except the last checkpoint" are deleted.
# DeepSpeed (Nebula), num_of_version_in_retention: 2 by default. torchtitan, checkpoint.keep_latest_k: 10 by default.
TRAINERS = {
    "Megatron-LM --save-retain-interval 1000": Case({"every_steps": 1000}, [1000, 2000, 2500], list(range(500, 3000, 500))),
    "DeepSpeed num_of_version_in_retention 2": Case({"last": 2}, [400, 500], [100, 200, 300, 400, 500]),
    "torchtitan keep_latest_k 10": Case({"last": 10}, list(range(3, 13)), list(range(1, 13))),
    # tf.train.CheckpointManager(max_to_keep=2, keep_checkpoint_every_n_hours=2), one save every 50 minutes.
    "TensorFlow max_to_keep 2, every 2 h": Case(
        {"last": 2, "every_seconds": 2 * HOUR_S},
        [0, 3, 6, 7],
        list(range(8)),
        [],
        [step * 50 * 60.0 for step in range(8)],
    ),
}

# restic forget: --keep-last, --keep-within (relative to the latest snapshot, which a policy that is applied after each one
# meets as "now"), --keep-tag and the like joined by union. One snapshot a day.
DAYS = list(range(1, 11))
RESTIC = {
    "keep-within 3d": Case({"within_seconds": 3 * DAY_S}, [7, 8, 9, 10], DAYS, [], [d * DAY_S for d in DAYS], 10 * DAY_S),
    "keep-last 2 --keep-within 0.5d": Case(
        {"last": 2, "within_seconds": DAY_S / 2}, [9, 10], DAYS, [], [d * DAY_S for d in DAYS], 10 * DAY_S
    ),
}
ALL = {
    f"{system}: {name}": case
    for system, cases in (
        ("orbax", ORBAX),
        ("Lightning", LIGHTNING),
        ("transformers", TRANSFORMERS),
        ("trainers", TRAINERS),
        ("restic", RESTIC),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
def test_a_published_policy(case: Case) -> None:
    """Every checkpoint being verified, exactly what the other system keeps is kept, and the newest one."""
    times = case.times or [float(i) for i in range(len(case.steps))]
    losses = case.losses or [None] * len(case.steps)
    history = [
        Candidate(step, at, metrics={} if loss is None else {"loss": float(loss)})
        for step, at, loss in zip(case.steps, times, losses, strict=True)
    ]
    decisions = decide(history, RetentionPolicy(**case.policy), case.now)
    assert sorted(d.step for d in decisions if d.keep) == sorted({*case.keeps, max(case.steps)})
