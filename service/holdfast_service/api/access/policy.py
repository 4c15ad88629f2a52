"""The access policy of a listener: decided once at the start, which fails where it would open the service to all clients
without an explicit flag.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.owner_key import OwnerKey
from holdfast_service.api.access.authentication import Policy
from holdfast_service.api.access.logins import Logins, load
from holdfast_service.api.access.owner_file import left_for_owner
from holdfast_service.config import Config, runtime_directory
from holdfast_service.control.access.owner import Owner

log = logging.getLogger(__name__)


def policy(config: Config, listener: socket.socket | None) -> Policy:
    """The policy of this listener; `InvalidRequest` where flags contradict each other or the address."""
    chosen = [name for name in ("loopback_open", "behind_tls", "insecure_no_tokens") if getattr(config, name)]
    if len(chosen) > 1:
        flags = " cannot be combined with ".join("--" + name.replace("_", "-") for name in chosen[:2])
        raise InvalidRequest(flags, hint="leave one of them out")
    logins = None if config.logins is None else _logins(config, config.logins)
    host = str(listener.getsockname()[0]) if listener is not None else "127.0.0.1"
    here, names = ip_address(host.partition("%")[0]).is_loopback, _names(config)
    if config.insecure_no_tokens:
        log.warning("--insecure-no-tokens: every client that reaches this service is an admin")
        return Policy(metrics_open=True, hosts=names)
    if config.loopback_open:
        if not here:
            hint = "leave it out: the `holdfast` command of the same user finds its token automatically"
            raise InvalidRequest(f"--loopback-open needs a loopback address, but --listen is {host}", hint=hint)
        log.warning("--loopback-open: every user of this machine is an admin")
        return Policy(metrics_open=config.metrics_open, hosts=names)
    if not here and not config.behind_tls:
        log.warning("tokens are sent to %s in clear text; pass --behind-tls if a proxy terminates TLS in front of it", host)
    return Policy(tokens=True, tls=config.behind_tls, metrics_open=config.metrics_open, hosts=names, logins=logins)


def _logins(config: Config, path: Path) -> Logins:
    for name in ("loopback_open", "insecure_no_tokens"):
        if getattr(config, name):
            flag = "--" + name.replace("_", "-")
            raise InvalidRequest(f"--logins cannot be combined with {flag}", hint="leave one of them out")
    return load(path)


@contextmanager
def announced(config: Config, listener: socket.socket, owner: Owner) -> Iterator[None]:
    """Publish the owner's token to programs of the same user, as long as the daemon serves."""
    host, port = listener.getsockname()[:2]
    key = OwnerKey(host=host.partition("%")[0], port=port, token=owner.token)
    places = dict.fromkeys([runtime_directory(), config.socket.absolute().parent])
    with left_for_owner(key, list(places)):
        yield


def _names(config: Config) -> frozenset[str]:
    """The names of this service: the machine's, --listen's, and --allowed-hosts."""
    listen = {config.listen[0].lower()} if config.listen else set()
    return config.allowed_hosts | {socket.gethostname().lower()} | listen
