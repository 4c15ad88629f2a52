"""Quantised models, as tests/integrations/quantised makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.corpus.cases import Case, Tensors
from tests.corpus.families.hugging_face import files

QUANTISED = {
    "bitsandbytes-8-bit": "bitsandbytes in 8 bits",
    "bitsandbytes-4-bit": "bitsandbytes in 4 bits",
    "compressed-tensors": "compressed-tensors",
}


def quantised(how: str) -> Callable[[Path], object]:
    def make(place: Path) -> None:
        from tests.integrations.quantised import test_quantised

        plain = place.parent / "plain"
        test_quantised.save_plain(plain)
        place.rmdir()  # some of them make it
        test_quantised.MAKERS[how](plain, place)

    return make


def quantised_loaded(place: Path) -> Tensors:
    from transformers import AutoModelForCausalLM

    where = {"dtype": torch.bfloat16, "device_map": "cpu"}
    state = AutoModelForCausalLM.from_pretrained(place, **where).state_dict()
    return {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}


CASES = (
    *(
        Case(name, name.rpartition("-")[0].removesuffix("-8").removesuffix("-4") if "bit" in name else name, quantised(how),
             files, quantised_loaded, environment="quantised")
        for name, how in QUANTISED.items()
    ),
)  # fmt: skip
