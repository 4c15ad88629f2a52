"""Each directory that Paddle wrote is of one kind."""

from __future__ import annotations

import pytest

from holdfast_service.wings.convert.foreign.kinds import choose
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from tests.wings.convert.foreign.directories import OnDisk
from tests.wings.convert.foreign.paddle.written import GOLDEN


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("uc_tp2_async", "paddle-uc"),
        ("uc_tp2_ignore_merge", "paddle-uc"),
        ("uc_tp2_quant_O1", "paddle-uc"),
        ("flex_sd2v2", "paddle-flex"),
        ("sharding_io_sd2v2", "paddle-sharding-io"),
        ("lora", "paddle-lora"),
    ],
)
def test_one_kind(name: str, kind: str) -> None:
    """By its files, without an option, of all kinds that are known."""
    assert choose(OnDisk(GOLDEN / name / "checkpoint-2"), None, KINDS).name == kind
