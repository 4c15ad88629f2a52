"""Shards are planned by what was written, or not at all (I7)."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from holdfast_formats import naming
from holdfast_service.api.content import shard_plans
from tests.api.shard_roots import PLAIN, path_of
from tests.checkpoints import build
from tests.layouts import models
from tests.serving import served


def test_a_config_that_became_another_plans_nothing(tmp_path: Path) -> None:
    """Sizes decide what a rank holds: a config.json that still reads, and is not what was written, is named."""
    model = models.llama()
    encoded = json.dumps(model.config).encode()
    built = build(tmp_path / naming.checkpoint_path("tiny", 5), {"model": model.arrays()}, run="tiny", config=encoded)
    (built.path / shard_plans.CONFIG).write_bytes(encoded.replace(b"llama", b"mlama"))
    with served(tmp_path) as running:
        asked = {"layout": "tp=2"}
        got = httpx.get(f"{running.url}{path_of('tiny')}", params=asked, headers=PLAIN, trust_env=False)
        assert got.status_code == 500, got.text
        assert (got.json()["code"], got.json()["file"]) == ("corrupt-extent", shard_plans.CONFIG)
        (built.path / shard_plans.CONFIG).write_bytes(encoded)
        again = httpx.get(f"{running.url}{path_of('tiny')}", params=asked, headers=PLAIN, trust_env=False)
        assert again.status_code == 200, again.text
