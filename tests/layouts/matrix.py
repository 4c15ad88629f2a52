"""The named layouts of each small model; every ordered pair of two of one model is a case."""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

from . import models
from .models import Model
from .oracle import World

MODELS: dict[str, Model] = {"llama": models.llama(), "moe": models.moe(), "neox": models.neox()}

LAYOUTS: dict[str, dict[str, World]] = {
    "llama": {
        "single": World(),
        "tp2": World(tp=2),
        "tp4-heads-shared": World(tp=4),
        "tp2-padded": World(tp=2, vocabulary=8),
        "tp4-padded": World(tp=4, vocabulary=16),
        "tp2-fused": World(tp=2, qkv="ranks", gate_up="ranks"),
        "tp2-grouped": World(tp=2, qkv="groups"),
        "grouped": World(qkv="groups", gate_up="ranks"),
        "pp2": World(pp=2),
        "pp3-explicit": World(pp=3, splits=(1, 3, 1)),
        "pp2-vpp2": World(pp=2, vpp=2),
        "tp2-pp2": World(tp=2, pp=2),
        "tp2-pp2-dp2-pp-inner": World(tp=2, pp=2, dp=2, order="pp-tp-cp-ep-sharding-dp"),
        "tp2-cp2": World(tp=2, cp=2),
        "ddp4": World(dp=4),
        "zero1-whole": World(sharding=4, stage=1),
        "zero1-flat": World(sharding=4, stage=1, method="flat", align=8),
        "zero2-flat-uneven": World(sharding=3, stage=2, method="flat", align=7),
        "fsdp2": World(sharding=3, stage=3),
        "fsdp2-more-ranks-than-rows": World(sharding=8, stage=3),
        "fsdp1": World(sharding=4, stage=3, method="flat-param"),
        "hsdp": World(dp=2, sharding=2, stage=3),
        "tp2-zero1-flat": World(tp=2, sharding=2, stage=1, method="flat", align=4),
        "tp2-pp2-zero1": World(tp=2, pp=2, sharding=2, stage=1),
        "tp2-fused-padded-zero1-flat": World(
            tp=2, sharding=2, stage=1, method="flat", align=16, qkv="groups", gate_up="ranks", vocabulary=8
        ),
        "tp2-fsdp2": World(tp=2, sharding=2, stage=3),
    },
    "moe": {
        "single": World(),
        "tp2": World(tp=2),
        "ep2": World(ep=2, sharding=2),
        "ep4": World(ep=4, sharding=4),
        "stacked": World(experts="stacked"),
        "ep2-stacked": World(ep=2, dp=2, experts="stacked"),
        "tp2-ep2": World(tp=2, ep=2, etp=1),
        "tp2-etp2-ep2": World(tp=2, ep=2, dp=2),
        "pp3": World(pp=3),
        "pp2-ep2": World(pp=2, ep=2, dp=2),
        "pp2-vpp2-ep2-zero1": World(pp=2, vpp=2, ep=2, sharding=2, stage=1, splits=(1, 1, 1, 0)),
        "ep2-zero1-whole": World(ep=2, sharding=4, stage=1),
        "ep2-zero1-flat": World(ep=2, sharding=4, stage=1, method="flat", align=8),
        "ep2-fsdp2": World(ep=2, sharding=4, stage=3),
        "tp2-ep2-stacked-zero2": World(tp=2, ep=2, etp=1, sharding=4, stage=2, experts="stacked"),
    },
    "neox": {
        "single": World(),
        "tp2": World(tp=2),
        "tp4": World(tp=4),
        "tp2-pp2": World(tp=2, pp=2),
        "tp2-zero1-flat": World(tp=2, sharding=2, stage=1, method="flat", align=8),
        "fsdp2": World(sharding=4, stage=3),
    },
}


class Pair(NamedTuple):
    """Saved in one layout, loaded in another."""

    model: str
    saved: str
    loaded: str

    def __str__(self) -> str:
        return f"{self.model}: {self.saved} to {self.loaded}"


PAIRS = [Pair(model, a, b) for model, layouts in LAYOUTS.items() for a, b in permutations(layouts, 2)]
