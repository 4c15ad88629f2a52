"""Connections to other machines: which certificates are trusted, and why one failed, in words without any address."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx

from holdfast_formats.errors import InvalidRequest

CAUSES_MAX = 10


def trusting(ca_file: Path | None) -> ssl.SSLContext:
    """Trusts the certificates of the system and those that httpx brings, or those in `ca_file` alone; `InvalidRequest`."""
    try:
        if ca_file is not None:
            return ssl.create_default_context(cafile=ca_file)
        made = httpx.create_ssl_context(trust_env=False)
        made.load_default_certs()
    except (OSError, ssl.SSLError) as error:
        where = ca_file or "this system"
        raise InvalidRequest(
            f"cannot read the certificates of {where}: {cause(error)}", hint="a file in PEM format"
        ) from None
    return made


def cause(error: BaseException) -> str:
    """What the system says of a failed connection; else only the kind of error, because messages may have the address."""
    for one in _chain(error):
        if isinstance(one, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {one.verify_message}"
        if isinstance(one, OSError) and one.strerror:
            return one.strerror
    return type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(CAUSES_MAX):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
