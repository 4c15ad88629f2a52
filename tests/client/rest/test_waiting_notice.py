"""A service that is reached and does not answer: whoever waits is told of it, and of nothing else."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.rest import api, waiting_notice
from holdfast_formats.errors import DaemonGone, exit_status


@pytest.mark.parametrize("words", [["ls"], ["top", "--once"], ["ls", "--json"]])
def test_it_is_said_while_it_is_waited_for(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the error says that it was reached, and what to do."""
    monkeypatch.setattr(waiting_notice, "SILENCE_S", 0.05)
    monkeypatch.setattr(api.Api.__init__, "__defaults__", (1.0, None))
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        made = CliRunner().invoke(app, [*words, "--url", url])
    assert made.exit_code == exit_status(DaemonGone("")), made.output
    assert f"no answer from {url} for 0.05 s: still waiting" in made.stderr
    assert "accepted the connection but did not answer" in made.output


def test_nothing_is_said_where_a_late_answer_was_asked_for() -> None:
    told: list[str] = []
    with waiting_notice.silence_reported(told.append), waiting_notice.awaited("http://x/", later=True):
        assert not told
    with waiting_notice.silence_reported(told.append), waiting_notice.awaited("http://x/", later=False):
        pass
    with waiting_notice.awaited("http://x/", later=False):
        pass
    time.sleep(0.01)
    assert not told
