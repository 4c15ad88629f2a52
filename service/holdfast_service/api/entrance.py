"""Who may come in at the address that was given: decided once, at the start, and refused where it would be everybody
unasked.
"""

from __future__ import annotations

import logging
import socket
from ipaddress import ip_address

from holdfast_formats.errors import InvalidRequest
from holdfast_service.config import Config
from holdfast_service.control.tokens import Tokens

from .doors import Policy

log = logging.getLogger(__name__)


def policy(config: Config, listener: socket.socket | None, tokens: Tokens) -> Policy:
    """The policy of this listener; `InvalidRequest` where flags contradict, or an address that others reach has no token."""
    asked = config.require_tokens or config.behind_tls
    if config.insecure_no_tokens and asked:
        raise InvalidRequest(
            "--insecure-no-tokens contradicts --require-tokens and --behind-tls", hint="leave one of them out"
        )
    host = str(listener.getsockname()[0]) if listener is not None else "127.0.0.1"
    here = ip_address(host.partition("%")[0]).is_loopback
    if config.insecure_no_tokens:
        log.warning("whoever reaches this service may do everything: --insecure-no-tokens")
        return Policy(metrics_open=True, hosts=config.allowed_hosts if here else None)
    needed = asked or not here
    if not here and not config.behind_tls:
        if not tokens.any_in_force():
            raise InvalidRequest(
                f"--listen {host} can be reached from other machines, and there is no token yet",
                hint=f"make one with `holdfast token create NAME --scope admin --root {config.root}`, listen at 127.0.0.1, "
                "or say what holds instead: --behind-tls or --insecure-no-tokens",
            )
        log.warning("tokens travel to %s in clear text; if a proxy speaks TLS in front of it, say --behind-tls", host)
    return Policy(tokens=needed, tls=config.behind_tls, metrics_open=config.metrics_open, hosts=config.allowed_hosts)
