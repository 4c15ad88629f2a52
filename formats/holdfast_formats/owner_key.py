"""The key file of a daemon for its own user, whose programs send the token to the daemon's HTTP address.

The token is new at every start. Only the user can read the file. It is in the user's runtime directory, or beside the
socket.
"""

from __future__ import annotations

import re
from ipaddress import ip_address

import msgspec

from holdfast_formats.decoding import decoder

GLOB = "http-*.key"
BYTES_MAX = 4096
SYSTEM_DIRECTORY = "/run/holdfast"  # where a service manager or a container puts the socket


_TOKEN = re.compile(r"hf_[A-Za-z0-9_=-]{1,125}")


class OwnerKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file: the address at which the daemon listens, and the token. `ValueError` if one is invalid."""

    host: str
    port: int
    token: str

    def __post_init__(self) -> None:
        if len(self.host) > 64 or not 1 <= self.port <= 65_535 or not _TOKEN.fullmatch(self.token):
            raise ValueError("not a daemon's key")

    def __repr__(self) -> str:
        return f"OwnerKey({self.host!r}, {self.port})"  # a log must not contain the token

    def address(self, host: str, port: int) -> str | None:
        """Where to connect for `host`:`port`; None unless that can only be this daemon.

        Another user may listen at the same port of another loopback address, so `localhost` becomes the exact address.
        """
        if port != self.port:
            return None
        wanted = self._own if host == "localhost" else host
        if wanted != self.host and not (self.host == "0.0.0.0" and _is_loopback(wanted, 4)) and wanted != self._own:
            return None
        return f"http://{bracketed(wanted)}:{port}"

    @property
    def _own(self) -> str:
        return reachable(self.host)


read_key = decoder(OwnerKey)


def file_name(port: int) -> str:
    return f"http-{port}.key"


def reachable(host: str) -> str:
    """The address for local connections to a listener at `host`: wildcard addresses become loopback."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str, version: int) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback and address.version == version
