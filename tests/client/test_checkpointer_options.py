"""The options of `Checkpointer`, and the names that they had before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from holdfast import Checkpointer, ParallelLayout
from holdfast.checkpointer_options import OldOptions, Settled, settle
from holdfast.link.address import DaemonAddress, place
from holdfast_formats.errors import InvalidRequest
from tests.daemons import running

OPTIONS_MAX = 11  # `info=` is the eleventh: only the trainer knows its config and owner, and it fits into no other option
NOWHERE = place(None)
NOTHING = Settled(NOWHERE, None, None, "sampled")

# Each old name: what it was given, what to write now, and what is meant.
OLD: dict[str, tuple[Any, str, Settled]] = {
    "root": ("data", "at=", NOTHING._replace(place=DaemonAddress(root=Path.cwd() / "data"))),
    "socket": ("run/daemon", "at=", NOTHING._replace(place=DaemonAddress(socket=Path.cwd() / "run/daemon"))),
    "url": ("http://node-7:8420", "at=", NOTHING._replace(place=DaemonAddress(url="http://node-7:8420"))),
    "launch": ("job-7", "HOLDFAST_LAUNCH", NOTHING._replace(launch="job-7")),
    "check": ("full", r"save\(…, check=…\)", NOTHING._replace(check="full")),
    "rules": ("rules.toml", r"layout=holdfast\.ParallelLayout\(layout, rules=…\)", NOTHING),
    "config": ({"model_type": "llama"}, r"layout=holdfast\.ParallelLayout\(layout, config=…\)", NOTHING),
}


def test_there_are_no_more_options_than_one_reads() -> None:
    """Eleven, by name; what `**old` takes beside them are old names, and each of them warns."""
    parameters = inspect.signature(Checkpointer).parameters.values()
    options = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    assert 0 < len(options) <= OPTIONS_MAX, options
    assert [one.name for one in parameters if one.kind is inspect.Parameter.VAR_KEYWORD] == ["old"]
    assert set(OLD) == set(get_type_hints(OldOptions)) and not set(OLD) & set(options)


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_works_and_says_what_to_write(name: str) -> None:
    """One warning, at the line that constructs the checkpointer."""
    value, instead, meant = OLD[name]
    with pytest.warns(DeprecationWarning, match=rf"^Checkpointer\({name}=…\) .*0\.2\.0: use .*{instead}") as told:
        Checkpointer("r", {"x": torch.ones(1)}, **{name: value})
    assert [warning.filename for warning in told] == [__file__]
    with pytest.warns(DeprecationWarning):
        assert settle(None, None, {name: value}) == meant  # type: ignore[misc]


def test_the_old_names_of_a_layout_go_into_it() -> None:
    """One warning for each."""
    config = {"model_type": "llama"}
    with pytest.warns(DeprecationWarning) as told:
        assert settle(None, "tp=2", {"rules": "r.toml", "config": config}).layout == ParallelLayout("tp=2", "r.toml", config)
    assert len(told) == 2
    assert settle(None, "tp=2", {}).layout == ParallelLayout("tp=2")
    assert settle(None, ParallelLayout("tp=2", config=config), {}).layout == ParallelLayout("tp=2", None, config)


def test_a_checkpoint_of_the_old_names_is_one_of_the_new(tmp_path: Path) -> None:
    """What was saved by a socket named as such is restored by `at`, and the other way round."""
    state = {"x": torch.arange(3.0)}
    with running(tmp_path / "root") as daemon:
        with pytest.warns(DeprecationWarning, match="socket="):
            old = Checkpointer("r", state, socket=daemon.socket)
        with old:
            old.save(1, wait="durable")
        state["x"].zero_()
        with Checkpointer("r", state, at=daemon.socket) as new:
            assert new.restore() == 1 and state["x"].tolist() == [0.0, 1.0, 2.0]
            new.save(2, wait="durable")
        with pytest.warns(DeprecationWarning, match="root="):
            old = Checkpointer("r", state, root=daemon.root)
        with old:
            assert old.restore() == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"at": "data", "root": "data"}, "at= and root="),
        ({"at": "data", "socket": "s.sock"}, "at= and socket="),
        ({"at": "http://h", "url": "http://h"}, "at= and url="),
        ({"root": "data", "url": "http://h"}, "root= and url="),
        ({"layout": ParallelLayout("tp=1"), "rules": "r.toml"}, "rules= stands beside layout="),
        ({"layout": ParallelLayout("tp=1"), "config": {}}, "config= stands beside layout="),
        ({"check": "some"}, "sampled, full"),
    ],
)
def test_what_is_said_twice_is_refused(options: dict[str, Any], said: str) -> None:
    """By both names, and instead of a warning."""
    with pytest.raises(InvalidRequest, match=said):
        Checkpointer("r", {"x": torch.ones(1)}, **options)


def test_a_launch_named_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the option and by the environment."""
    monkeypatch.setenv("HOLDFAST_LAUNCH", "job-7")
    with pytest.warns(DeprecationWarning), pytest.raises(InvalidRequest, match="launch= and HOLDFAST_LAUNCH"):
        Checkpointer("r", {"x": torch.ones(1)}, launch="job-7")


@pytest.mark.parametrize("call", [lambda **given: Checkpointer("r", {}, **given), lambda **given: settle(None, None, given)])
def test_a_name_that_never_was_one_is_a_type_error(call: Callable[..., object]) -> None:
    """As Python says it."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'roots'"):
        call(roots="data")
