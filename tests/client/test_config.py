"""What the client takes from its surroundings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast import config
from holdfast_formats.errors import InvalidRequest
from holdfast_service import config as service_config


def test_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is in the runtime directory, else in a directory of the user's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert config.default_socket() == Path("/run/user/7/holdfast/holdfast.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")  # the daemon would serve elsewhere than its ranks look
    assert config.default_socket() == Path(f"/tmp/holdfast-{os.getuid()}/holdfast.sock")
    assert service_config.default_socket({"XDG_RUNTIME_DIR": "relative"}) == config.default_socket()
    assert service_config.default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/holdfast/holdfast.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert config.default_socket() == Path(f"/tmp/holdfast-{os.getuid()}/holdfast.sock")


def test_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOLDFAST_URL, else the default address."""
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    assert (config.given_url(), config.default_url()) == (None, "http://127.0.0.1:8420")
    monkeypatch.setenv("HOLDFAST_URL", "http://node-7:1")
    assert config.given_url() == config.default_url() == "http://node-7:1"


def test_launch() -> None:
    """torchrun's variables; without them rank 0 of 1; its default run id is none."""
    assert config.launch_info({}) == (0, 1, None, 0, None, None)
    given = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "job-7",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    assert config.launch_info(given) == (3, 8, "job-7", 2, 4, None)
    assert config.launch_info({"TORCHELASTIC_RUN_ID": "none"}).run_id is None
    assert config.launch_info({"HOLDFAST_LAUNCH": " job-7 "}).launch == "job-7"
    assert config.launch_info({"HOLDFAST_LAUNCH": ""}).launch is None


@pytest.mark.parametrize("name", ["x" * 201, "a\nb", "\x00"])
def test_a_launch_has_a_name_that_can_be_told(name: str) -> None:
    """What no daemon would take is refused by the variable's name."""
    with pytest.raises(InvalidRequest, match="HOLDFAST_LAUNCH"):
        config.launch_info({"HOLDFAST_LAUNCH": name})


@pytest.mark.parametrize("given", [{"RANK": "x"}, {"RANK": "-1"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "0"}])
def test_impossible_launch(given: dict[str, str]) -> None:
    """What cannot be is refused by the variable's name."""
    with pytest.raises(InvalidRequest, match="RANK"):
        config.launch_info(given)
