"""The demo's data: real text, and an order that goes on exactly where it was saved."""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

import numpy as np

from holdfast.demo.model import build_tokenizer
from holdfast.demo.text import FIRST_BYTE, VOCABULARY, ShuffledWindows, read_text

TEXT = np.arange(4000) % 251


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


def test_the_text_is_the_standard_library_in_the_models_vocabulary() -> None:
    """Tokens are the bytes, in the numbers of the demo's tokenizer, and the ends of files."""
    text = read_text(5000)
    assert len(text) == 5000
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=str).read_bytes()
    assert bytes((text[: len(first)] - FIRST_BYTE).astype(np.uint8)) == first[:5000]
    assert build_tokenizer()(first[:10].decode(), add_special_tokens=False)["input_ids"] == text[:10].tolist()
    assert text.min() >= 0 and text.max() < VOCABULARY


def test_a_restored_order_goes_on_over_the_end_of_an_epoch() -> None:
    """Saved as JSON in the middle of an epoch and loaded into another loader, the batches are the same."""
    first, second = ShuffledWindows(TEXT, 64, 4, seed=1), ShuffledWindows(TEXT, 64, 4, seed=2)
    for _ in range(9):
        first.next_batch(0, 2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(20):
        seeded(5)
        expected = first.next_batch(1, 2)
        seeded(5)
        for ours, theirs in zip(second.next_batch(1, 2), expected, strict=True):
            assert np.array_equal(ours, theirs)
    assert first.state_dict() == second.state_dict()
    assert first.state_dict()["epoch"] > 0


def test_the_ranks_share_a_batch_without_overlap() -> None:
    """Two ranks' windows of one step come from different places of the text."""
    text = np.arange(64 * 20)
    batches = []
    for rank in range(2):
        seeded(0)
        batches.append(ShuffledWindows(text, 64, 4, seed=1).next_batch(rank, 2)[1])
    places = [{int(row[0]) // 64 for row in targets} for targets in batches]
    assert len(places[0]) == len(places[1]) == 4
    assert not places[0] & places[1]
