"""The REST API, typed: a method for each route, lists as iterators over their pages, problems as the errors they were."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from holdfast import config
from holdfast.rest import bounded
from holdfast.rest.filters import NO_FILTER, Filter
from holdfast.rest.jobs import JobsApi
from holdfast.rest.owner_auth import OwnersToken
from holdfast.rest.rate_limit_retry import RateLimitRetry
from holdfast_formats.errors import CheckpointError, DaemonGone, DeadlineExceeded, StorageFailed, from_problem
from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import Difference, Layers, TensorStatistics
from holdfast_formats.staging import messages
from holdfast_formats.timestamps import check_seconds

AGENT = "holdfast/1"  # the service's audit log distinguishes our client by it
PAGE_ITEMS = 500
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
IDLE_S = 2.0  # idle connections are closed then: the service closes them after 5, which could lose a request
CONNECTIONS_MAX = 16
SEND_BYTES = (
    256 * 2**10
)  # a body is sent in pieces of this size: sending a large one at once copies the rest again and again
Step = int | Literal["latest", "latest-healthy"]
StatisticsSort = Literal["name", "rms", "change", "nonfinite", "bytes", "zeros"]
Model = TypeVar("Model", bound=BaseModel)
Part = Literal["data", "table"]
Query = Mapping[str, str | list[str] | None]


class UploadChunk(NamedTuple):
    """A piece of an upload: its place, its digest before compression, and its bytes."""

    offset: int
    length: int
    total: int
    digest: str
    body: memoryview | bytes
    encoding: str | None = None


def _certificates(url: str) -> ssl.SSLContext | bool:
    """Without TLS no certificate is loaded, which takes longer than to list runs; a redirect to TLS is not followed."""
    return True if url.lower().startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True)
class Pieces:
    """A body in pieces; it can be sent again if it was refused the first time."""

    body: memoryview | bytes

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self.body), SEND_BYTES):
            yield bytes(self.body[at : at + SEND_BYTES])


class Api(JobsApi):
    """The REST API of one service, typed: a method for each route. Thread-safe; a context manager.

    Lists are iterators over all pages. Problems are raised as the errors of `holdfast_formats.errors` that the service
    raised.

    Args:
        url: The service's address, such as http://127.0.0.1:8420.
        timeout_s: How long an answer may take, in seconds.
        token: The token to send. The default is HOLDFAST_TOKEN, or the token that this user's own daemon left, or
            ~/.config/holdfast/token.

    Raises:
        InvalidRequest: For a token that HTTP cannot carry, or a token file that others can read.

    Example:
        >>> with Api("http://127.0.0.1:8420") as api:
        ...     [run.name for run in api.runs() if run.life == "training"]
        ['llama3-8b']
    """

    def __init__(self, url: str, timeout_s: float = READ_TIMEOUT_S, token: str | None = None) -> None:
        check_seconds(timeout_s, "timeout_s")
        self.url = url.rstrip("/")
        shown = config.stated_token() if token is None else config.check_token(token, "token=")
        own = OwnersToken(self.url) if shown is None else None
        if own is not None and not own.token:
            shown = config.given_token()
        limits = httpx.Limits(max_connections=CONNECTIONS_MAX, keepalive_expiry=IDLE_S)
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
            transport=bounded.BoundedTransport(RateLimitRetry(httpx.HTTPTransport(limits=limits, trust_env=False))),
            headers={"User-Agent": AGENT, "Accept-Encoding": "identity"}
            | ({} if shown is None else {"Authorization": f"Bearer {shown}"}),
            auth=own,
            verify=_certificates(self.url),
            trust_env=False,  # a proxy meant for the web must not be used between a node and its own daemon
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Api:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def health(self) -> bodies.Health:
        return self._get("/healthz", bodies.Health)

    def sign_of_life(self, timeout_s: float) -> None:
        """Ping the service. `DeadlineExceeded` if it does not answer within so many seconds, `DaemonGone` if there is
        none.
        """
        try:
            self._checked(self._http.get("/healthz", timeout=timeout_s))
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"{self.url} did not respond within {timeout_s:.1f} s") from error
        except httpx.HTTPError as error:
            raise self._gone(error) from error

    def runs(self, prefix: str = "", sort: str = "name", tags: Sequence[str] = ()) -> Iterator[bodies.Run]:
        """Runs by name, or by a column of `RUN_SORTS`; with `prefix`, those whose names begin with it; with `tags`, those
        that have all of them.
        """
        wanted: Query = {"prefix": prefix or None, "sort": None if sort == "name" else sort, "tag": list(tags) or None}
        return self._pages("/v1/runs", bodies.Run, wanted)

    def run(self, run: str) -> bodies.Run:
        return self._get(_run_path(run), bodies.Run)

    def checkpoints(self, run: str, wanted: Filter = NO_FILTER) -> Iterator[bodies.CheckpointInfo]:
        """The run's checkpoints, newest step first; those that match `wanted`."""
        return self._pages(f"{_run_path(run)}/checkpoints", bodies.CheckpointInfo, wanted.query())

    def checkpoint(self, run: str, step: Step = "latest") -> bodies.CheckpointInfo:
        return self._get(_step_path(run, step), bodies.CheckpointInfo)

    def best(self, run: str, metric: str, mode: Literal["min", "max"] = "min") -> bodies.CheckpointInfo:
        """The verified and healthy checkpoint with the lowest metric, or the highest."""
        with self._translated():
            answer = self._http.get(f"{_run_path(run)}/checkpoints/best", params={"metric": metric, "mode": mode})
            return self.parsed(self._checked(answer).content, bodies.CheckpointInfo)

    def statistics(
        self, run: str, step: Step = "latest", group: str | None = None, sort: StatisticsSort = "name", part: str = ""
    ) -> Iterator[TensorStatistics]:
        """Value statistics of tensors with `part` in their name; `NoSuchResource` before the checkpoint was verified."""
        query = {"group": group, "sort": sort, "q": part or None}
        return self._pages(f"{_step_path(run, step)}/statistics", TensorStatistics, query)

    def layers(self, run: str, group: str = "model", last: int = 50) -> Layers:
        """Health by layer over the newest steps."""
        with self._translated():
            answer = self._http.get(f"{_run_path(run)}/layers", params={"group": group, "last": last})
            return self.parsed(self._checked(answer).content, Layers)

    def remove(self, run: str, step: int) -> None:
        """Remove a checkpoint; `Pinned`, `InUse`, `NewestVerified` or `NewestHealthy` when it may not. See `retention`."""
        self.request("DELETE", _step_path(run, step))

    def get(self, path: str, model: type[Model]) -> Model:
        """The answer of a route as the given model, for routes that have no method here."""
        return self._get(path, model)

    def pages(self, path: str, item: type[Model], query: Query | None = None) -> Iterator[Model]:
        """The items of any list, page by page."""
        return self._pages(path, item, query)

    def request(self, method: str, path: str, **parts: Any) -> httpx.Response:
        """Any request, as httpx takes it; an unsuccessful response is raised as its error."""
        with self._translated():
            return self._checked(self._http.request(method, path, **parts))

    def parsed(self, content: bytes, model: type[Model]) -> Model:
        """Response content as the given model; `StorageFailed` if it is invalid."""
        return bounded.parsed(content, model, self.url)

    def manifest_bytes(self, run: str, step: Step = "latest") -> bytes:
        """The stored manifest."""
        from holdfast_formats.disk.manifests import MANIFEST_BYTES_MAX  # with numpy, which lists do without

        bound = {bounded.BYTES_MAX: MANIFEST_BYTES_MAX}
        with self._translated():
            return self._checked(self._http.get(f"{_step_path(run, step)}/manifest", extensions=bound)).content

    def tensors(self, run: str, step: Step = "latest", group: str | None = None) -> Iterator[bodies.Tensor]:
        return self._pages(f"{_step_path(run, step)}/tensors", bodies.Tensor, {"group": group})

    def files(self, run: str, step: Step = "latest") -> Iterator[bodies.File]:
        return self._pages(f"{_step_path(run, step)}/files", bodies.File)

    def file_range(self, run: str, step: Step, name: str, offset: int, buffer: memoryview) -> int:
        """Read a file from `offset` on into `buffer`; return the bytes read, fewer than asked for only at its end.

        The service sends verified bytes only. If it meets damage after the first byte, it can only cut the connection. Then
        the rest is requested, and the answer to that names the damage.
        """
        done = 0
        while done < len(buffer):
            before = done
            try:
                for chunk in self._range(
                    f"{_step_path(run, step)}/files/{quote(name, safe='')}", offset + done, len(buffer) - done
                ):
                    part = chunk[: len(buffer) - done]
                    buffer[done : done + len(part)] = part
                    done += len(part)
            except httpx.TransportError as error:
                if done == before:
                    raise self._gone(error) from error
                continue
            break
        return done

    def rounds(self, run: str | None = None, state: str | None = None, wanted: Filter = NO_FILTER) -> Iterator[bodies.Round]:
        """Rounds (saves), newest first; of this run, in this state, and those that match `wanted`."""
        return self._pages("/v1/rounds", bodies.Round, {**wanted.query(), "run": run, **({"state": state} if state else {})})

    def compare(self, run: str, a: Step, b: Step, **how: str | int | bool) -> Iterator[Difference]:
        """Compare two checkpoints, tensor by tensor; `how` has `run_b`, `group`, `state`, `q`, `exact`, `limit`
        (docs/api.md).
        """
        query = {"a": a, "b": b, **how}
        return self._pages(f"{_run_path(run)}/compare", Difference, {name: str(value) for name, value in query.items()})

    def nodes(self) -> list[bodies.Node]:
        """The daemons that share the service's catalog."""
        return list(self._pages("/v1/nodes", bodies.Node))

    def forget_node(self, name: str) -> None:
        """Remove a lost node from the list; `InUse` if it is live."""
        with self._translated():
            self._checked(self._http.delete(f"/v1/nodes/{quote(name, safe='')}"))

    def rotate_node_secret(self) -> None:
        """Make a new secret by which the catalog's nodes authenticate each other; the old one is valid until the next
        rotation.
        """
        with self._translated():
            self._checked(self._http.post("/v1/nodes/secret"))

    def join(self, rank_id: str, hello: bodies.RankHello) -> bodies.RankWelcome:
        """Register as a rank that shares no memory with the daemon; idempotent."""
        return self._send("PUT", _rank_path(rank_id), hello, bodies.RankWelcome)

    def leave(self, rank_id: str, timeout_s: float) -> None:
        """Disconnect the rank; its unsealed uploads end."""
        with self._translated():
            self._checked(self._http.delete(_rank_path(rank_id), timeout=timeout_s))

    def reserve(self, rank_id: str, room: messages.Room) -> None:
        """Reserve memory for the rank's slots; `LimitExceeded` if the daemon's arena is too small."""
        with self._translated():
            self._checked(self._http.put(f"{_rank_path(rank_id)}/segment", json=room.model_dump()))

    def open_upload(
        self, rank_id: str, number: int, wanted: messages.SlotRequest, timeout_s: float | None = None
    ) -> bodies.Upload:
        """Begin the rank's `number`-th upload; raises the reason if the step may not be saved."""
        return self._send("PUT", _upload_path(rank_id, number), wanted, bodies.Upload, timeout_s)

    def upload(self, rank_id: str, number: int) -> bodies.Upload:
        """The progress of an upload."""
        return self._get(_upload_path(rank_id, number), bodies.Upload)

    def put_chunk(self, rank_id: str, number: int, part: Part, chunk: UploadChunk) -> bodies.Upload:
        """Send one chunk; when this returns it has been received and verified."""
        headers = {
            "Content-Length": str(len(chunk.body)),
            "Content-Range": f"bytes {chunk.offset}-{chunk.offset + chunk.length - 1}/{chunk.total}",
            "X-Content-Digest": f"xxh3-64={chunk.digest}",
        }
        if chunk.encoding is not None:
            headers["Content-Encoding"] = chunk.encoding
        with self._translated():
            answer = self._http.put(f"{_upload_path(rank_id, number)}/{part}", content=Pieces(chunk.body), headers=headers)
            return self.parsed(self._checked(answer).content, bodies.Upload)

    def seal_upload(self, rank_id: str, number: int, whole: bodies.SealRequest) -> bodies.Upload:
        """Complete an upload; from then on the daemon saves it, even if the rank dies."""
        return self._send("POST", f"{_upload_path(rank_id, number)}/seal", whole, bodies.Upload)

    def abandon_upload(
        self, rank_id: str, number: int, why: messages.AbandonRequest, timeout_s: float | None = None
    ) -> bodies.Upload:
        """Abandon an upload and its step's save."""
        return self._send("POST", f"{_upload_path(rank_id, number)}/abandon", why, bodies.Upload, timeout_s)

    def stopping(self, rank_id: str, passed_step: messages.PassedStep, timeout_s: float) -> messages.LastStep:
        return self._send("PUT", f"{_rank_path(rank_id)}/stopping", passed_step, messages.LastStep, timeout_s)

    def waits(self, rank_id: str, waiting: messages.Waiting, timeout_s: float) -> None:
        with self._translated():
            path = f"{_rank_path(rank_id)}/waiting"
            self._checked(self._http.put(path, json=waiting.model_dump(mode="json"), timeout=timeout_s))

    def outcomes(self, rank_id: str, after: int, wait_s: float) -> bodies.Outcomes:
        """Ended uploads, after waiting for one. The request also counts as a sign of life."""
        with self._translated():
            answer = self._http.get(f"{_rank_path(rank_id)}/outcomes", params={"after": after, "wait_s": wait_s})
            return self.parsed(self._checked(answer).content, bodies.Outcomes)

    def choose(self, rank_id: str, turn: int, question: bodies.Question) -> messages.Answer:
        """Ask which step to restore; `DeadlineExceeded` while older saves are being written: ask again."""
        return self._send("PUT", f"{_rank_path(rank_id)}/choices/{turn}", question, messages.Answer)

    def restore_ended(self, rank_id: str, turn: int, end: bodies.RestoreEnd) -> messages.RestoreVerdict:
        """Report how a restore ended; returns whether to go on. `DeadlineExceeded` while others restore: ask again."""
        return self._send("PUT", f"{_rank_path(rank_id)}/choices/{turn}/end", end, messages.RestoreVerdict)

    def _send(self, method: str, path: str, body: BaseModel, model: type[Model], timeout_s: float | None = None) -> Model:
        headers = {"Content-Type": "application/json"}
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        content = body.model_dump_json().encode()
        with self._translated():
            answer = self._http.request(method, path, content=content, headers=headers, timeout=timeout)
            return self.parsed(self._checked(answer).content, model)

    def _range(self, path: str, first: int, length: int) -> Iterator[bytes]:
        headers, bound = {"Range": f"bytes={first}-{first + length - 1}"}, {bounded.BYTES_MAX: length}
        with self._http.stream("GET", path, headers=headers, extensions=bound) as response:
            if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                return
            if response.is_error:
                response.read()
            self._checked(response)
            if response.status_code != httpx.codes.PARTIAL_CONTENT:
                raise StorageFailed(
                    f"{self.url} answered a range request with status {response.status_code}",
                    hint="check that the address is a Holdfast service",
                )
            yield from response.iter_raw()

    def _pages(self, path: str, item: type[Model], query: Query | None = None) -> Iterator[Model]:
        page_of: type[bodies.Page[Model]] = bodies.Page[item]  # type: ignore[valid-type]
        params: dict[str, str | int | list[str]] = {
            name: value for name, value in (query or {}).items() if value is not None
        }
        params.setdefault("limit", PAGE_ITEMS)
        while True:
            with self._translated():
                page = self.parsed(self._checked(self._http.get(path, params=params)).content, page_of)
            yield from page.items
            if page.next is None:
                return
            if not page.items:
                raise StorageFailed(f"{self.url} sent an empty page that announces further pages", hint=bounded.HINT)
            params["cursor"] = page.next

    def _get(self, path: str, model: type[Model]) -> Model:
        with self._translated():
            return self.parsed(self._checked(self._http.get(path)).content, model)

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        raise _rebuilt(response)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise self._gone(error) from error

    def _gone(self, error: httpx.HTTPError) -> DaemonGone:
        hint = "start it with `holdfast serve`, or pass another address (at=, --url or HOLDFAST_URL)"
        if isinstance(error, httpx.ReadTimeout):
            hint = "the service accepted the connection but did not answer: check its log, and restart it if it hangs"
        return DaemonGone(f"no answer from {self.url}: {error or type(error).__name__}", hint=hint)


def was_reached(error: CheckpointError) -> bool:
    """Whether a service exists that did not answer in time."""
    return isinstance(error.__cause__, httpx.ReadTimeout | httpx.WriteTimeout)


def _rebuilt(response: httpx.Response) -> CheckpointError:
    try:
        body: Any = response.json()
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict) and "code" in body:
        return from_problem(body)
    hint = "check that the address is a Holdfast service"
    return StorageFailed(f"{response.url} answered {response.status_code} {response.reason_phrase}", hint=hint)


def _run_path(run: str) -> str:
    return f"/v1/runs/{quote(run, safe='')}"


def _rank_path(rank_id: str) -> str:
    return f"/v1/ranks/{rank_id}"


def _upload_path(rank_id: str, number: int) -> str:
    return f"{_rank_path(rank_id)}/uploads/{number}"


def _step_path(run: str, step: Step) -> str:
    return f"{_run_path(run)}/checkpoints/{step}"
