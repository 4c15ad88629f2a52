"""Logging of the service: one line per record, as text or JSON, with the same declared fields.

Messages name a save as RUN@STEP, or the caller passes it with `about`. Only the fields that docs/api.md lists are written,
so that no secret leaks through a field.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import re
import sys
import threading
from datetime import datetime, timezone
from typing import Any, Literal

from holdfast_formats import timestamps
from holdfast_formats.errors import CheckpointError, Unavailable
from holdfast_formats.printable import visible_json, visible_lines

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LogFormat = Literal["text", "json"]

_GIVEN = ("run", "step", "attempt", "code")
# How messages name a save, wherever they do: then its parts are fields as well.
_PLACE = re.compile(r"%s@%s(?P<attempt> attempt %s)?")
_ARGUMENT = re.compile(r"%(?!%)")


def about(run: str | None = None, step: int | None = None, attempt: int | None = None, **more: Any) -> dict[str, Any]:
    """The `extra` of a log record: the save concerned, and the `code` or `error`."""
    error = more.pop("error", None)
    if isinstance(error, CheckpointError):
        more["code"] = error.code
    assert more.keys() <= set(_GIVEN), more
    return {
        name: value for name, value in {"run": run, "step": step, "attempt": attempt, **more}.items() if value is not None
    }


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record: as given by `about`, otherwise parsed from its message, and an error's code."""
    values = {name: vars(record)[name] for name in _GIVEN if vars(record).get(name) is not None}
    arguments = record.args if isinstance(record.args, tuple) else ()
    place = _PLACE.search(record.msg) if isinstance(record.msg, str) else None
    if place is not None:
        first = len(_ARGUMENT.findall(record.msg, 0, place.start()))
        names = ("run", "step", "attempt") if place["attempt"] else ("run", "step")
        values = dict(zip(names, arguments[first:], strict=False)) | values
    raised = record.exc_info[1] if record.exc_info else None
    for error in (raised, *arguments):
        if isinstance(error, CheckpointError):
            values.setdefault("code", error.code)
    return values


def _in_words(record: logging.LogRecord) -> logging.LogRecord:
    """The record on one line: for errors of ours the message with its hint, and for environment failures, such as a full
    disk or an unavailable catalog, no traceback.
    """
    if not isinstance(record.args, tuple):
        return record
    raised = record.exc_info[1] if record.exc_info else None
    ended = raised if isinstance(raised, Unavailable) else None
    error = ended or next((one for one in record.args if isinstance(one, CheckpointError)), None)
    if error is None:
        return record
    arguments = tuple(_said(one) if isinstance(one, CheckpointError) else one for one in record.args)
    values = {"code": error.code, **vars(record), "args": arguments}
    if ended is not None:
        message = f"{record.msg if record.args else str(record.msg).replace('%', '%%')}: %s"
        values |= {"msg": message, "args": (*arguments, _said(ended)), "exc_info": None, "exc_text": None}
    return logging.makeLogRecord(values)


def _said(error: CheckpointError) -> str:
    return f"{error.detail}; {error.hint}" if error.hint else error.detail


class JsonLines(logging.Formatter):
    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        record = _in_words(record)
        line: dict[str, Any] = {
            "time": timestamps.write(datetime.fromtimestamp(record.created, timezone.utc)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "node": self._node,
            **fields(record),
        }
        if record.levelno >= logging.WARNING and record.threadName:
            line["thread"] = record.threadName
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return visible_json(json.dumps(line, ensure_ascii=False, default=str))


class TextLines(logging.Formatter):
    """Format a record as a text line; run, step and code are appended unless the message names them.

    Control characters are escaped, and further lines indented, so that none looks like a record.
    """

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return visible_lines(super().format(_in_words(record))).replace("\n", "\n    ")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        missing = [f"{name}={value}" for name, value in fields(record).items() if str(value) not in record.message]
        return f"{line} [{' '.join(missing)}]" if missing else line


def start_logging(level: str, form: LogFormat = "text", node: str = "node") -> None:
    """Log to stderr from `level` on; `ValueError` for an unknown level. Libraries log only warnings. A fatal signal logs the
    stacks of all threads: a watchdog ends a daemon that hangs by SIGABRT.
    """
    if sys.__stderr__ is not None:  # it may be closed
        faulthandler.enable(sys.__stderr__)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(node) if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    for library in ("alembic", "sqlalchemy", "httpx", "httpcore", "uvicorn", "opentelemetry", "botocore", "urllib3"):
        logging.getLogger(library).setLevel(logging.WARNING)


def log_what_nobody_catches() -> None:
    """Log uncaught exceptions that end the process or a thread."""
    log = logging.getLogger("holdfast_service")

    def ended(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            return
        log.critical("unexpected %s: the daemon stops", kind.__name__, exc_info=(kind, error, trace))

    def thread_ended(given: threading.ExceptHookArgs) -> None:
        if given.exc_value is not None and not issubclass(given.exc_type, SystemExit):
            name = given.thread.name if given.thread else "?"
            trace = (given.exc_type, given.exc_value, given.exc_traceback)
            log.error("unexpected %s ended the thread %s", given.exc_type.__name__, name, exc_info=trace)

    sys.excepthook = ended
    threading.excepthook = thread_ended
