"""Holder processes, which keep the memory of staged saves while no daemon runs, for `holdfast doctor`."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.terminal.console import human_bytes
from holdfast.terminal.probes import Finding
from holdfast_formats.errors import CheckpointError, StorageFailed
from holdfast_formats.staging.socket_paths import addressable
from holdfast_formats.timestamps import span

ASK_S = 2.0
ANSWER_BYTES_MAX = 1_000_000
SAVES_NAMED_MAX = 5
_CREDENTIALS = struct.Struct("iII")  # SO_PEERCRED: process, user, group


def found(directory: Path) -> Iterator[Finding]:
    """Holders whose sockets are in the daemon's runtime directory, and what holders there have released."""
    for path in sorted(directory.glob("*.holder")):
        try:
            yield _shown(_about(path))
        except (ConnectionRefusedError, FileNotFoundError):
            continue  # of a holder that was killed: the next one takes its place
        except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
            advice = "it may belong to another user; the next daemon of its root takes over its saves"
            yield Finding("holder", "warn", f"cannot read what {path} holds: {error}", advice)
    for path in sorted(directory.glob("*.lost")):
        yield from _lost(path)


def _about(path: Path) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(ASK_S)
        with addressable(path) as name:
            link.connect(name)
        uid = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
        if uid not in (0, os.geteuid()):
            raise StorageFailed(f"it is a process of user {uid}")
        link.send(b"about")
        document = json.loads(link.recv(ANSWER_BYTES_MAX))
    if not isinstance(document, dict):
        raise ValueError("its answer is not an object")
    return document


def _shown(report: dict[str, Any]) -> Finding:
    saves = [str(save) for save in report["saves"]]
    named = ", ".join(saves[:SAVES_NAMED_MAX]) + (" and more" if len(saves) > SAVES_NAMED_MAX else "")
    what = (
        f"process {int(report['pid'])} holds {human_bytes(int(report['bytes']))} of {report['root'] or 'an unknown root'} "
        f"for {span(float(report['age_s']))}"
    )
    if report["supervises"]:
        what += ", and restarts its daemon if the daemon is killed"
    if report["alone_s"] is None or not int(report["segments"]):
        return Finding("holder", "ok", what)
    what += f"; no daemon has connected to it for {span(float(report['alone_s']))}"
    if saves:
        advice = f"staged and not committed: {named}. Start the daemon of that root; the holder also tries to start it"
        return Finding("holder", "warn", what, advice)
    return Finding("holder", "warn", what, "it frees this memory within two minutes")


def _lost(path: Path) -> Iterator[Finding]:
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            saves = sorted({f"{save['run']}@{save['step']}" for save in record["saves"]})
            what = f"staged saves of {record['root']} were given up, because {record['why']}: {', '.join(saves)}"
            yield Finding(
                "holder", "warn", what, f"remove {path} after reading this; otherwise the root's next daemon removes it"
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Finding("holder", "warn", f"{path} cannot be read: {error}", "remove it")
