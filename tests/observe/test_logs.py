"""Logs: one line a record, the fields that docs/api.md lists and no others, whoever logs."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import httpx
import pytest
import torch

from holdfast import Checkpointer
from holdfast_formats.errors import GenerationDropped, InvalidRequest, NoSpace
from holdfast_service.observe.logs import JsonLines, TextLines, about
from tests.daemons import running

API_MD = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
FIELDS = re.findall(r"^\| `(\w+)` \|", API_MD[API_MD.index("## Logs") : API_MD.index("## Traces")], re.MULTILINE)
ALWAYS = set(FIELDS[:5])


def a_record(message: object, *arguments: object, level: int = logging.WARNING, **given: object) -> logging.LogRecord:
    return logging.getLogger("holdfast_service.test").makeRecord(
        "holdfast_service.test",
        level,
        __file__,
        1,
        message,
        arguments,
        None,
        extra=given,  # type: ignore[arg-type]
    )


def raised(error: Exception, message: str, *arguments: object) -> logging.LogRecord:
    """An error that is logged where it was caught, with its traceback."""
    try:
        raise error
    except type(error):
        return logging.getLogger("x").makeRecord("x", logging.ERROR, __file__, 1, message, arguments, sys.exc_info())


def as_json(record: logging.LogRecord) -> dict:
    line = JsonLines("node-1").format(record)
    assert "\n" not in line
    parsed: dict = json.loads(line)
    return parsed


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (a_record("%s@%s attempt %s aborted", "llama", 5, 2), {"run": "llama", "step": 5, "attempt": 2}),
        (a_record("in %.2f s: %s@%s is gone", 0.5, "llama", 5), {"run": "llama", "step": 5}),
        (a_record("%s", NoSpace("full")), {"code": "no-space"}),
        (
            a_record("said by hand", **about("llama", 7, error=NoSpace("full"))),
            {"run": "llama", "step": 7, "code": "no-space"},
        ),
        (a_record("100 %% of it"), {}),
        (a_record("nothing to say"), {}),
        (a_record({"not": "text"}), {}),
    ],
)
def test_what_a_record_is_about(record: logging.LogRecord, fields: dict) -> None:
    """Run, step, attempt and code are found in what it was given, or in how its message names a save."""
    line = as_json(record)
    assert {name: line[name] for name in ("run", "step", "attempt", "code") if name in line} == fields
    assert set(line) <= set(FIELDS) and line.keys() >= ALWAYS
    assert (line["node"], line["level"], line["logger"]) == ("node-1", "warning", "holdfast_service.test")
    assert datetime.fromisoformat(line["time"].replace("Z", "+00:00")).tzinfo is not None


def test_undeclared_fields_are_not_written() -> None:
    """What a record carries besides, a token for example, stays out of the log."""
    assert "hf_secret" not in JsonLines("n").format(a_record("hello", token="hf_secret", authorization="hf_secret"))
    assert "hf_secret" not in TextLines().format(a_record("hello", token="hf_secret"))


def test_exceptions_have_their_traceback_and_code() -> None:
    """The traceback is one member, so that a record stays one line."""
    line = as_json(raised(InvalidRequest("not so"), "failed"))
    assert line["code"] == "invalid-request" and "Traceback" in line["exception"] and "thread" in line


@pytest.mark.parametrize(
    ("message", "arguments", "said"),
    [("%s@%s failed", ("llama", 5), "llama@5 failed"), ("100 % of it failed", (), "100 % of it failed")],
)
def test_a_full_disk_is_one_line_without_a_traceback(message: str, arguments: tuple[object, ...], said: str) -> None:
    """It is no mistake of the program: the record has what failed, why, and what to do; wherever it is logged."""
    record = raised(NoSpace("no room at /root", hint="free space"), message, *arguments)
    text, line = TextLines().format(record), as_json(record)
    assert text.endswith(f"{said}: no room at /root; free space [code=no-space]") and "\n" not in text
    assert line["message"] == f"{said}: no room at /root; free space" and "exception" not in line
    assert line["code"] == "no-space" and line.get("step") == (5 if arguments else None)


def test_an_error_in_a_message_is_one_line() -> None:
    """With what to do, and its code once."""
    record = a_record("POST /v1/x: %s", GenerationDropped.of(7, None, "newest-wins"))
    text, line = TextLines().format(record), as_json(record)
    assert "\n" not in text and "; save less often" in text and text.endswith("[code=generation-dropped]")
    assert "step 7 was dropped" in line["message"] and line["code"] == "generation-dropped"


def test_text_says_what_the_message_does_not() -> None:
    """Lines for people end in what is known besides, once."""
    assert (
        TextLines()
        .format(a_record("%s@%s failed: full", "llama", 5, **about(code="no-space")))
        .endswith("llama@5 failed: full [code=no-space]")
    )
    assert TextLines().format(a_record("plain")).endswith("plain")


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines("n")])
def test_what_others_say_is_no_line_and_steers_no_terminal(formatter: logging.Formatter) -> None:
    """A rank's error, for example: its lines are indented, and escapes are shown as such."""
    try:
        raise ValueError("\x9b2J\n2030-01-01 INFO x: forged")
    except ValueError:
        record = a_record("%s", "a\x1b[2Jb\u202e\n2030-01-01 INFO x: forged")
        record.exc_info = sys.exc_info()
    shown = formatter.format(record)
    assert not set(shown) & set("\x1b\x9b\u202e") and "\n2030" not in shown and "forged" in shown


def test_api_md_lists_the_fields() -> None:
    """docs/api.md has every field that a line can have, in the order of the line, and no other."""
    record = raised(InvalidRequest("not so"), "%s@%s attempt %s failed", "llama", 5, 2)
    assert FIELDS == list(as_json(record)) == ["time", "level", "logger", "message", "node", *FIELDS[5:]]


def test_daemon_logs_json_alone(tmp_path: Path) -> None:
    """Every line of a daemon that saves, refuses and ends is such an object; a save can be followed by its fields."""
    with running(tmp_path / "root", "--log-format", "json", "--node", "node-1", listen="127.0.0.1:0") as daemon:
        with Checkpointer("llama", {"model": torch.nn.Linear(4, 4)}, at=str(daemon.socket)) as checkpointer:
            checkpointer.save(3).result(180)
        httpx.get(f"{daemon.url}/v1/runs/nope", trust_env=False)
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    assert all(line.keys() >= ALWAYS and set(line) <= set(FIELDS) for line in lines)
    assert {line["node"] for line in lines} == {"node-1"}
    (committed,) = [line for line in lines if "committed:" in line["message"]]
    assert (committed["run"], committed["step"], committed["attempt"]) == ("llama", 3, 1)


@pytest.mark.parametrize(
    "how", ["raise ValueError('boom')", "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()"]
)
def test_what_nobody_catches_is_logged(how: str) -> None:
    """An exception that ends the process or a thread is a line like any other."""
    begin = "import threading\nfrom holdfast_service.observe.logs import *\n"
    begin += "start_logging('info', 'json')\nlog_what_nobody_catches()\n"
    ended = subprocess.run([sys.executable, "-c", begin + how], capture_output=True, text=True, check=False)
    (line,) = [json.loads(line) for line in ended.stderr.splitlines()]
    assert "unexpected" in line["message"] and "Traceback" in line["exception"]
