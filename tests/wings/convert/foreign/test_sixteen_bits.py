"""16-bit integers stay integers, or become bfloat16, by what the checkpoint itself says; else the user is asked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign.sixteen_bits import StoredDtype, taken_for_bfloat16

IDS = TensorKey("model", "lookup.ids")
NUMBERS = [1, 500, 65535]


def read(directory: Path, int16: str | None = None) -> ForeignListing:
    files = hub_snapshot.opened(directory)
    return choose(files, None, KINDS).read(files, ReadOptions(int16=int16))


def model(directory: Path, ids: np.dtype, dtype: str, **others: np.ndarray) -> None:
    """A model with a table of 16-bit integers."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": dtype}))
    held = {IDS.name: np.array(NUMBERS, "<u2").astype(ids), **others}
    save_file(held, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_table_of_integers_is_never_taken_for_other_numbers(tmp_path: Path, dtype: str) -> None:
    """Refused by name with the option that decides, which keeps it, or takes it for bfloat16."""
    model(tmp_path, np.dtype("u2"), dtype, w=np.ones(2, "f4"))
    with pytest.raises(StateMismatch, match=r"'lookup\.ids' in model\.safetensors is U16") as caught:
        read(tmp_path)
    assert "--int16 integers" in caught.value.hint
    kept = read(tmp_path, "integers")
    assert kept.tensors[IDS].spec.dtype == "U16"
    assert fetched(hub_snapshot.opened(tmp_path), kept.tensors[IDS]).tolist() == NUMBERS
    taken = read(tmp_path, "bfloat16")
    assert taken.tensors[IDS].spec.dtype == "BF16"
    assert taken.notes == ("U16 values were read as bfloat16",)


def test_signed_ones_of_a_bfloat16_model(tmp_path: Path) -> None:
    """I16 is asked for where config.json has dtype bfloat16 and no tensor is; elsewhere it is what it says."""
    model(tmp_path, np.dtype("i2"), "bfloat16")
    with pytest.raises(StateMismatch, match=r"'lookup\.ids' .* is I16, and config.json has dtype bfloat16"):
        read(tmp_path)
    assert read(tmp_path, "bfloat16").tensors[IDS].spec.dtype == "BF16"
    model(tmp_path, np.dtype("i2"), "float32")
    assert read(tmp_path).tensors[IDS].spec.dtype == "I16"


def test_torch_tells_both_apart(tmp_path: Path) -> None:
    """In a torch file a tensor of uint16 is one, and numpy's array is refused by name."""
    torch.save({IDS.name: torch.tensor(NUMBERS, dtype=torch.uint16)}, tmp_path / "model.pt")
    assert read(tmp_path).tensors[IDS].spec.dtype == "U16"
    torch.save({IDS.name: np.array(NUMBERS, "u2")}, tmp_path / "model.pt", pickle_protocol=4)
    with pytest.raises(StateMismatch, match=r"'lookup\.ids', a numpy array of U16"):
        read(tmp_path)


def test_an_adapter(tmp_path: Path) -> None:
    """The same holds for the tensors of an adapter."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"lookup.ids": np.array(NUMBERS, "u2")}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(StateMismatch, match=r"'lookup\.ids' .* is U16"):
        read(tmp_path)
    assert read(tmp_path, "integers").tensors[TensorKey("adapter", "lookup.ids")].spec.dtype == "U16"


def test_what_decides() -> None:
    """A BF16 tensor beside them, or that Paddle wrote them; both at once decide nothing."""
    ids, bf16, signed = StoredDtype("ids", "U16", "a"), StoredDtype("w", "BF16", "a"), StoredDtype("s", "I16", "a")
    assert taken_for_bfloat16([ids, bf16], {}, None) is None
    assert taken_for_bfloat16([signed, bf16], {"torch_dtype": "bfloat16"}, None) is None
    assert taken_for_bfloat16([signed, ids], {}, "bfloat16") == "U16"  # signed ones beside them are what they say
    assert taken_for_bfloat16([ids, signed], {}, None, of_paddle=True) == "U16"
    assert taken_for_bfloat16([signed], {"torch_dtype": "bfloat16"}, None, of_paddle=True) is None
    with pytest.raises(StateMismatch, match="'w' is BF16"):
        taken_for_bfloat16([ids, bf16], {}, None, of_paddle=True)
    with pytest.raises(StateMismatch, match="has dtype bfloat16"):
        taken_for_bfloat16([signed], {"text_config": {"dtype": "bfloat16"}}, None)
