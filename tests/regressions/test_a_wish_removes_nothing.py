"""`keep_last` of a trainer is the owner's to turn into removals: from a `write` token it is a wish, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from holdfast.rest.tokens import RootTokens
from holdfast_formats import naming
from holdfast_formats.rest.operations import TokenRequest
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_formats.staging import wire
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.storage import PosixTier, stored_in
from tests.checkpoints import build, build_root
from tests.control.published import mark_verified
from tests.daemons import running
from tests.databases import sqlite_url


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    build_root(tmp_path, {"tiny": (5, 10, 15)})
    catalog = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"))
    made = Control(stored_in(PosixTier(tmp_path)), catalog, None)
    made.recovery.recover()
    for step in (5, 10, 15):
        mark_verified(catalog, "tiny", step)
    yield made
    made.close()
    catalog.close()


def there(control: Control) -> list[int]:
    return sorted(verdict.step for verdict in control.rotation.verdicts.preview("tiny").verdicts if verdict.keep)


def test_a_stranger_s_wish_is_not_in_force(control: Control) -> None:
    """It changes nothing, is answered by a notice, and is granted by a policy alone."""
    control.launches.declare("tiny", "launch", 1, None)
    assert there(control) == [5, 10, 15] and control.rotation.file("tiny").keep_last is None
    (notice,) = control.wishes.denied("tiny", 1, owner=False)
    assert "keep_last=1 is not applied" in notice and control.wishes.denied("tiny", 1, owner=True) == ()
    control.rotation.set_policy("tiny", RetentionPolicy(last=1), "*")
    assert control.wishes.denied("tiny", 1, owner=False) == ()


def test_a_new_wish_does_not_reach_back(control: Control, tmp_path: Path) -> None:
    """The owner's counts for what is committed from that launch on, at every later launch; a policy reaches everything."""
    attempt = control.launches.declare("tiny", "launch", 1, 1)
    assert there(control) == [5, 10, 15]
    catalog = control.rotation._catalog
    for step in (20, 25):
        made = catalog.checkpoint("tiny", 15).model_copy(update={"step": step, "attempt": attempt})
        build(tmp_path / naming.checkpoint_path("tiny", step), step=step)
        catalog.record_checkpoint(made)
        mark_verified(catalog, "tiny", step)
    assert there(control) == [5, 10, 15, 25]
    control.launches.declare("tiny", "later", 1, 1)
    assert there(control) == [5, 10, 15, 25]
    control.rotation.set_policy("tiny", RetentionPolicy(last=1), "*")
    assert control.rotation.wait_until_applied() and there(control) == [25]


def test_a_write_token_is_told_that_it_only_wishes(tmp_path: Path) -> None:
    """Over HTTP the scope decides: `write` gets a notice and nothing of the run changes, `admin` sets what is kept."""
    root = tmp_path / "root"
    tokens = {s: RootTokens(root).create(TokenRequest(name=s, scope=s)).token for s in ("write", "admin")}  # type: ignore[arg-type]
    hello = {"protocol": wire.PROTOCOL, "run": "r", "rank": 0, "world": 1, "launch": "x", "process": "p", "keep_last": 1}
    with running(root, listen="127.0.0.1:0", closed=True) as daemon:
        for number, (scope, kept) in enumerate((("write", None), ("admin", 1))):
            headers = {"Authorization": f"Bearer {tokens[scope]}"}
            path = f"{daemon.url}/v1/ranks/{number:032x}"
            welcome = httpx.put(path, json=hello, headers=headers, trust_env=False, timeout=180).json()
            assert len(welcome["notices"]) == (kept is None)
            found = httpx.get(f"{daemon.url}/v1/runs/r", headers=headers, trust_env=False, timeout=180).json()
            assert found["keep_last"] == kept
