"""Limits the size of responses, which may come from any machine: their bytes, and their memory once parsed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import httpx
import msgspec
from pydantic import BaseModel, ValidationError

from holdfast_formats.body import message
from holdfast_formats.decoding import decoder
from holdfast_formats.errors import StorageFailed

ANSWER_BYTES_MAX = 16 * 2**20  # a page of a list has far less
PROBLEM_BYTES_MAX = 2**20
LINE_BYTES_MAX = 2**20  # of a stream of events
MISTAKES_MAX = 100  # of more, none is described: that alone would take gigabytes
BYTES_MAX = "answer_bytes_max"  # request extension with another limit; None: the reader limits it itself
HINT = "check that the address is a Holdfast service of the same version"

Model = TypeVar("Model", bound=BaseModel)
_values = decoder(Any)


class BoundedTransport(httpx.BaseTransport):
    """Refuses a response that is longer than its request allows, and a compressed one."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self._transport = transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._transport.handle_request(request)
        assert isinstance(response.stream, httpx.SyncByteStream)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":  # a few bytes could become gigabytes
            response.close()
            raise StorageFailed(f"{request.url} sent a compressed answer, which was not requested", hint=HINT)
        bytes_max: int | None = request.extensions.get(BYTES_MAX, ANSWER_BYTES_MAX)
        if response.is_error:
            bytes_max = PROBLEM_BYTES_MAX
        if bytes_max is not None:
            response.stream = _BoundedStream(response.stream, str(request.url), bytes_max)
        return response

    def close(self) -> None:
        self._transport.close()


class _BoundedStream(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, url: str, bytes_max: int) -> None:
        self._stream, self._url, self._bytes_max = stream, url, bytes_max

    def __iter__(self) -> Iterator[bytes]:
        done = 0
        for part in self._stream:
            done += len(part)
            if done > self._bytes_max:
                raise StorageFailed(f"{self._url} sent an answer of more than {self._bytes_max} bytes", hint=HINT)
            yield part

    def close(self) -> None:
        self._stream.close()


def lines(answer: httpx.Response) -> Iterator[str]:
    """The lines of an endless stream; `StorageFailed` for one that is too long."""
    line = bytearray()
    for part in answer.iter_raw():
        for at, piece in enumerate(part.split(b"\n")):
            if at:
                yield line.decode(errors="replace").removesuffix("\r")
                line.clear()
            line += piece
            if len(line) > LINE_BYTES_MAX:
                raise StorageFailed(f"{answer.url} sent a line of more than {LINE_BYTES_MAX} bytes", hint=HINT)


def parsed(content: bytes, model: type[Model], url: str) -> Model:
    """JSON as the given model; `StorageFailed` if it is invalid. msgspec parses it: pydantic's parser keeps three
    kilobytes for each `[]`.
    """
    try:
        return model.model_validate(_values(content))
    except ValidationError as error:
        count = error.error_count()
        first = message(error) if count <= MISTAKES_MAX else f"it has {count} errors"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        first = str(error) or type(error).__name__
    raise StorageFailed(f"{url} sent an invalid answer: {first}", hint=HINT)
