"""Watching other daemons, which are real ones here: what is shown of them, and what is shown when one is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.operations import TokenRequest
from holdfast_service.api.access.authentication import Policy
from holdfast_service.wings.notify.watched_daemons import summary_client
from holdfast_service.wings.notify.watched_daemons.watched import DaemonWatch, check_address, read_tokens
from tests.checkpoints import build_root
from tests.daemons import free_port, wait_until
from tests.serving import served
from tests.wings.notify.receivers import secret, serving


@contextmanager
def watching(*urls: str, tokens: dict[str, str] | None = None) -> Iterator[DaemonWatch]:
    made = DaemonWatch(urls, tokens or {}, ask_s=0.05)
    try:
        yield made
    finally:
        made.close()


def test_all_runs_of_all_daemons(tmp_path: Path) -> None:
    """With links to each daemon's own page; one that is gone keeps its runs, and it is said since when."""
    build_root(tmp_path / "a", {"llama": (5, 10)})
    build_root(tmp_path / "b", {"gpt": (1,), "llama": (7,)})
    with served(tmp_path / "b") as b:
        with served(tmp_path / "a") as a, watching(a.url, b.url) as watch:
            wait_until(lambda: all(one.reachable for one in watch.daemons()))
            found = {(one.daemon, one.summary.run): one for one in watch.runs()}
            names = {url: url.removeprefix("http://") for url in (a.url, b.url)}
            assert set(found) == {(names[a.url], "llama"), (names[b.url], "llama"), (names[b.url], "gpt")}
            assert found[names[b.url], "gpt"].url == f"{b.url}/runs/gpt"
            assert httpx.get(found[names[a.url], "llama"].url, trust_env=False).status_code == 200
            assert found[names[a.url], "llama"].summary.newest == 10
            assert watch.alerts(0.0) == []
            gone, kept = watch, names[a.url]
        # its server is closed, and so is the watch: another one begins, and does not reach it
        assert {one.summary.run for one in gone.runs() if one.daemon == kept} == {"llama"}
        with watching(a.url, b.url) as watch:
            wait_until(lambda: {one.name: one.reachable for one in watch.daemons()} == {kept: False, names[b.url]: True})
            first = watch.daemons()[0]
            assert (first.name, first.asked, first.runs) == (kept, None, 0)
            assert first.unreachable_since and first.problem == "Connection refused"


def test_a_daemon_that_goes_and_comes_back(tmp_path: Path) -> None:
    """It is unreachable since a time that stays, an alert tells of it, and all is well again when it answers."""
    build_root(tmp_path / "a", {"llama": (5,)})
    with served(tmp_path / "a") as a, closing_proxy(a.url) as proxy, watching(proxy.url) as watch:
        wait_until(lambda: watch.daemons()[0].reachable)
        proxy.fails = True
        wait_until(lambda: not watch.daemons()[0].reachable)
        since = watch.daemons()[0].unreachable_since
        asked = proxy.asked
        wait_until(lambda: proxy.asked > asked + 3)
        one = watch.daemons()[0]
        assert one.unreachable_since == since and one.runs == 1 and one.problem == "it replied with status 500"
        assert [run.reachable for run in watch.runs()] == [False]
        ((run, alert),) = watch.alerts(0.0)
        assert (run, alert.code, alert.level) == ("", "daemon-unreachable", "error") and str(since) in alert.text
        proxy.fails = False
        wait_until(lambda: watch.daemons()[0].reachable)
        assert watch.daemons()[0].unreachable_since is None and watch.alerts(0.0) == []


class Proxy(ThreadingHTTPServer):
    """Hands requests on, unless it fails."""

    daemon_threads = True

    def __init__(self, to: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handed)
        self.to, self.fails, self.asked = to, False, 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answer: tuple[int, dict[str, str], bytes] | None = None
        self.answers: dict[str, bytes] = {}  # by path
        self.seen: list[str | None] = []


class _Handed(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        self.server.asked += 1
        self.server.seen.append(self.headers.get("authorization"))
        if self.server.answer is not None:
            status, headers, body = self.server.answer
        elif (found := self.server.answers.get(self.path.partition("?")[0])) is not None:
            status, headers, body = 200, {}, found
        elif self.server.fails:
            status, headers, body = 500, {}, b"no"
        else:
            got = httpx.get(self.server.to + self.path, trust_env=False)
            status, headers, body = got.status_code, {}, got.content
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


def closing_proxy(to: str) -> AbstractContextManager[Proxy]:
    return serving(Proxy(to))


def test_a_token_goes_to_its_own_address_alone(tmp_path: Path) -> None:
    """A daemon that asks for one is unreachable without it; a redirect does not take it elsewhere."""
    build_root(tmp_path / "a", {"llama": (5,)})
    with served(tmp_path / "a", access=Policy(tokens=True)) as a, closing_proxy(a.url) as thief:
        token = a.services.tokens.create(TokenRequest(name="watcher")).token
        with watching(a.url) as watch:
            wait_until(lambda: "--watch-tokens" in (watch.daemons()[0].problem or ""))
        with watching(a.url, thief.url, tokens={a.url: token}) as watch:
            wait_until(lambda: [one.summary.run for one in watch.runs()] == ["llama"])
            wait_until(lambda: thief.asked > 0)
        assert set(thief.seen) == {None}
        with closing_proxy(a.url) as moved, watching(moved.url, tokens={moved.url: token}) as watch:
            moved.answer = (302, {"Location": f"{thief.url}/healthz"}, b"")
            wait_until(lambda: watch.daemons()[0].problem == "it replied with status 302")
        assert set(thief.seen) == {None}


NONE = "does not come from a Holdfast daemon"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        *((body, NONE) for body in (b"", b"{}", b'{"items": 3}', b"[" * 10_000, b'{"version": "1", "status": "ok"}')),
        (b" " * 50_000, "too long"),
    ],
)
def test_an_answer_that_is_none(body: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary_client, "ANSWER_BYTES_MAX", 20_000)
    with closing_proxy("") as proxy, watching(proxy.url) as watch:
        proxy.answer = (200, {"Content-Type": "application/json"}, body)
        wait_until(lambda: why in (watch.daemons()[0].problem or ""))


@pytest.mark.parametrize(
    "url", ["gpu-1:8420", "ftp://gpu-1", "http://", "http://a/x", "http://u:p@a", "http://a:x", "http://a?q=1", "http://ä"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--watch"):
        check_address(url)


def test_tokens_are_read_from_a_file_that_not_everybody_reads(tmp_path: Path) -> None:
    """Whatever is wrong with it, no message shows a token."""
    good = secret(tmp_path, "# a comment\n\nhttp://a:1/ hf_verysecret\nhttps://b hf_other", "tokens")
    assert read_tokens(good) == {"http://a:1": "hf_verysecret", "https://b": "hf_other"}
    for number, text in enumerate(
        ("http://a hf_verysecret extra", "http://a hf_verysecret\nhttp://a/ hf_x", "hf_verysecret hf")
    ):
        with pytest.raises(InvalidRequest) as refused:
            read_tokens(secret(tmp_path, text, f"wrong-{number}"))
        assert "verysecret" not in f"{refused.value.detail} {refused.value.hint}"
    good.chmod(0o644)
    with pytest.raises(InvalidRequest, match="every user can read"):
        read_tokens(good)
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_tokens(tmp_path / "nothing")
    with pytest.raises(InvalidRequest, match="which is not watched"):
        DaemonWatch(["http://a"], {"http://b": "hf_x"})


def test_what_somebody_may_see(tmp_path: Path) -> None:
    """Who sees some runs only is told of the daemons that have them, and of no reason that names more."""
    build_root(tmp_path / "a", {"llama": (5,), "gpt": (6,)})
    with served(tmp_path / "a") as a, watching(a.url, f"http://127.0.0.1:{free_port()}") as watch:
        wait_until(lambda: len(watch.runs()) == 2)
        (seen,) = watch.daemons({"llama"}.__contains__)
        assert (seen.runs, seen.ranks, seen.problem) == (1, 0, None) and watch.daemons({"nobody"}.__contains__) == []
        assert [one.summary.run for one in watch.runs({"llama"}.__contains__)] == ["llama"]
