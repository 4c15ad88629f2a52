"""Finds the daemon at an address, starts one if there is none, and sends the hello."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.config import default_socket
from holdfast.link import embedded, roots
from holdfast.link.address import DaemonAddress
from holdfast.link.unix_socket import SocketLink
from holdfast.transport import Transport
from holdfast_formats.errors import CheckpointError, DaemonGone, NoSpace, WrongRoot
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging.wire import Outcome, Welcome

LinkEvents = tuple[Callable[[Outcome], None], Callable[[CheckpointError], None]]  # of outcomes, and of the daemon's loss


Greet = Callable[[Transport, RootMark | None], Welcome]  # sends the hello; the root that is meant, if any


class DaemonConnection(NamedTuple):
    """A connected daemon; `notes` name daemons of other roots that were skipped."""

    link: Transport
    welcome: Welcome
    notes: tuple[str, ...] = ()


def connect(
    where: DaemonAddress,
    run: str,
    start: bool,
    link_events: LinkEvents,
    greet: Greet,
    on_stop: Callable[[], object] = bool,
) -> DaemonConnection:
    """Connect to the daemon of this address; start one if `start` allows. `DaemonGone` if there is none, `NoSpace` if none
    starts on a full disk.

    At a URL, it uses the socket if that is reachable and the caller's token is for `run`: the socket knows no tokens.
    Otherwise it uses HTTP, where the rank stages into its own memory, and a token for other runs is refused. A daemon
    counts as the directory's own only if it confirms so: a socket path or file in the directory may be another daemon's.
    """

    def link(path: Path) -> SocketLink:
        return SocketLink(path, *link_events, lambda: _next_socket(where, path), on_stop)

    if where.socket is not None:
        return _greeted(link(where.socket), greet, None)
    if where.url is not None:
        return _greeted(_at_url(where.url, run, link, link_events, on_stop), greet, None)
    directory = where.directory
    notes: list[str] = []
    wrong: list[Path] = []
    known = _ours(default_socket()) if where.fallback is not None else None
    candidates: list[tuple[Path, RootMark | None]] = [(known, None)] if known is not None else []
    if directory is not None:
        candidates += [(named, roots.mark(directory))] if (named := roots.running_socket(directory)) is not None else []
        notes += [note] if (note := roots.other_daemon(directory)) is not None else []
    closed: DaemonGone | None = None
    for path, meant in candidates:
        try:
            return _greeted(link(path), greet, meant)._replace(notes=tuple(notes))
        except DaemonGone as gone:
            closed = gone if meant is not None and isinstance(gone.__cause__, PermissionError) else closed
        except WrongRoot as error:
            wrong.append(path)
            notes.append(f"{directory} names {path} as its daemon's socket: {error.detail}")
    if not start or directory is None:
        if closed is not None:
            raise closed
        raise DaemonGone("; ".join([f"no daemon serves {directory}", *notes]), hint="start one with `holdfast serve`")
    try:
        served = embedded.start(directory, wrong, where.bucket)
    except (DaemonGone, NoSpace) as error:
        raise closed or error from error.__cause__
    connected = link(served)
    return _greeted(connected, greet, roots.mark(directory))._replace(notes=tuple(notes))


@contextmanager
def none_on_full_disk() -> Iterator[None]:
    """A successor that does not start on a full disk is one that has not come yet: staged saves wait for it."""
    try:
        yield
    except NoSpace as error:
        raise DaemonGone(error.detail, hint=error.hint) from error


def _at_url(
    url: str,
    run: str,
    link: Callable[[Path], SocketLink],
    link_events: LinkEvents,
    on_stop: Callable[[], object],
) -> Transport:
    from holdfast.link.own_daemon import socket_of  # a trainer of this machine starts without httpx
    from holdfast.remote.http_link import RemoteLink
    from holdfast.rest.api import Api
    from holdfast_formats.rest.access import Whoami

    with Api(url) as api:
        near = socket_of(api) if api.get("/v1/whoami", Whoami).may_save(run) else None
    if near is not None:
        with suppress(DaemonGone):  # the socket is there, but not for us
            return link(near)
    return RemoteLink(url, *link_events, on_stop)


def _greeted(link: Transport, greet: Greet, meant: RootMark | None) -> DaemonConnection:
    try:
        return DaemonConnection(link, greet(link, meant))
    except CheckpointError:
        link.close()
        raise


def _ours(path: Path) -> Path | None:
    """A default socket, unless its directory belongs to another user: under /tmp any user could have created it."""
    try:
        owner = path.parent.stat().st_uid
    except OSError:
        return None
    return path if owner in (0, os.geteuid()) else None


def _next_socket(where: DaemonAddress, path: Path) -> Path:
    """The socket of the successor of the daemon at `path`. Embedded daemons are restarted."""
    if where.directory is None:
        return path
    if embedded.is_embedded(path):
        with none_on_full_disk():
            return embedded.start(where.directory, bucket=where.bucket)
    return roots.running_socket(where.directory) or path
