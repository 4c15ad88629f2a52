"""Connections to other machines: trusted certificates, and causes of failures without any address."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx

from holdfast_formats.errors import InvalidRequest

CAUSES_MAX = 10

Made = TypeVar("Made")


class _Loop(asyncio.SelectorEventLoop):
    """Resolves names in threads that are not awaited: a name server may take minutes, and the daemon may have to end."""

    async def getaddrinfo(self, host: Any, port: Any, **how: Any) -> Any:
        future: asyncio.Future[Any] = self.create_future()

        def answer(tell: Callable[[Any], None], what: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                self.call_soon_threadsafe(lambda: None if future.done() else tell(what))

        def look_up() -> None:
            try:
                answer(future.set_result, socket.getaddrinfo(host, port, **how))
            except Exception as error:
                answer(future.set_exception, error)

        threading.Thread(target=look_up, name="holdfast-name", daemon=True).start()
        return await future


def within(seconds: float, work: Coroutine[Any, Any, Made]) -> Made:
    """Run network work in this thread, with a limit for the whole; `TimeoutError`. Limits for each step are not enough: a
    server may send a byte at a time.
    """
    loop = _Loop()
    try:
        return loop.run_until_complete(asyncio.wait_for(work, seconds))
    except asyncio.TimeoutError as late:  # the same as the one that is raised here, but for Python 3.10
        raise TimeoutError("it took too long") from late
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def trusting(ca_file: Path | None) -> ssl.SSLContext:
    """Trusts the certificates of the system and of httpx, or only those in `ca_file`; `InvalidRequest`."""
    try:
        if ca_file is not None:
            if not ca_file.is_file():  # a pipe would be waited for
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return ssl.create_default_context(cafile=ca_file)
        ssl_context = httpx.create_ssl_context(trust_env=False)
        ssl_context.load_default_certs()
    except (OSError, ssl.SSLError) as error:
        where = ca_file or "this system"
        raise InvalidRequest(
            f"cannot read the certificates of {where}: {cause(error)}", hint="a file in PEM format"
        ) from None
    return ssl_context


def cause(error: BaseException) -> str:
    """The system's message for a failed connection; else only the kind of error, because messages may have the address."""
    for one in _chain(error):
        if isinstance(one, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {one.verify_message}"
        if isinstance(one, OSError) and one.strerror:
            known = one.errno is not None and one.errno in errno.errorcode and not isinstance(one, ssl.SSLError)
            return os.strerror(one.errno or 0) if known else one.strerror  # asyncio's own words have the address
    return type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(CAUSES_MAX):
        if error is None:
            return
        yield error
        each: Sequence[BaseException] = getattr(error, "exceptions", ())  # of a group: one for each address of a host
        error = each[-1] if each else error.__cause__ or error.__context__
