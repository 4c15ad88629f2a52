"""DNS rebinding and other sites' pages in a real Chromium: they read nothing and change nothing, whatever the door asks for.

A name that the attacker owns points at the daemon, and the page of that name comes from the attacker (the browser is
handed it without a request): so scripts of it are of the daemon's origin, as far as the browser can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser, Page, sync_playwright

from holdfast.rest.api import Api
from holdfast.rest.tokens import RootTokens, ServiceTokens
from holdfast_formats.rest.operations import TokenRequest
from tests.checkpoints import build_root
from tests.daemons import RunningDaemon, running
from tests.wings.console.chromium import FLAGS, PROGRAM

pytestmark = [pytest.mark.attack, pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")]

EVIL = "evil.example"
SECRET = "team-secret"
# The protection of newer browsers against such pages is off: the daemon's own has to do.
_OPEN = "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests,PrivateNetworkAccessForNavigations"
READS = (
    "/",
    "/healthz",
    "/readyz",
    "/login",
    "/metrics",
    "/openapi.json",
    "/v1/runs",
    "/v1/nodes",
    "/static/page.js",
    "/nope",
)
PIN = f"/v1/runs/{SECRET}/checkpoints/1/pin"
# What comes back of each: the status and the text where the page may read them, else the browser's refusal.
ASK = """async ([base, reads, writes]) => {
    const said = {};
    const ask = async (name, path, how) => {
        try {
            const answer = await fetch(base + path, {credentials: 'include', ...how});
            said[name] = [answer.status, (await answer.text()).slice(0, 4000)];
        } catch (error) { said[name] = [0, String(error)]; }
    };
    for (const path of reads) await ask('GET ' + path, path, {});
    for (const path of reads) await ask('shown ' + path, path, {headers: {Authorization: 'Bearer hf_no'}});
    for (const [method, path, type, body] of writes)
        for (const mode of ['cors', 'no-cors'])
            await ask(mode + ' ' + method + ' ' + path + ' ' + type, path,
                {method, mode, body: body || undefined, headers: type ? {'Content-Type': type} : {}});
    return said;
}"""
TOKEN = '{"name": "stolen", "scope": "admin"}'
WRITES = (
    ("POST", "/v1/tokens", "application/json", TOKEN),
    ("POST", "/v1/tokens", "text/plain", TOKEN),
    ("POST", "/v1/tokens", "application/x-www-form-urlencoded", TOKEN),
    ("PUT", PIN, "", ""),
    ("POST", "/v1/jobs", "application/json", '{"kind": "rebuild"}'),
    ("DELETE", f"/v1/runs/{SECRET}/checkpoints/1", "", ""),
    ("POST", f"/runs/{SECRET}/checkpoints/1/pin", "application/x-www-form-urlencoded", "x=y"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    rules = f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=PROGRAM, headless=True, args=[*FLAGS, _OPEN, rules])
        try:
            yield found
        finally:
            found.close()


@contextmanager
def attacked(root: Path, *flags: str, listen: str = "127.0.0.1:0") -> Iterator[tuple[RunningDaemon, Api, str]]:
    """A daemon with one run, its admin, and that one's token."""
    build_root(root, {SECRET: (1,)})
    admin = RootTokens(root).create(TokenRequest(name="admin", scope="admin")).token
    with running(root, *flags, listen=listen, closed=True) as daemon, Api(local(daemon), token=admin) as api:
        yield daemon, api, admin


def local(daemon: RunningDaemon) -> str:
    return daemon.url.replace("0.0.0.0", "127.0.0.1")


def page_of(browser: Browser, origin: str, cookie: tuple[str, str] | None = None) -> Page:
    """The attacker's page at an origin of its own; the browser may be signed in at the daemon, by (address, token)."""
    context = browser.new_context()
    if cookie is not None:
        at, token = cookie
        strict: Any = {"name": "holdfast_token", "value": token, "url": at, "httpOnly": True, "sameSite": "Strict"}
        context.add_cookies([strict])
    page = context.new_page()
    page.route("**/attack.html", lambda route: route.fulfill(content_type="text/html", body="<title>a game</title>"))
    page.goto(f"{origin}/attack.html")
    return page


def untouched(api: Api) -> bool:
    """Whether nothing was made, pinned, removed or begun."""
    (made,) = api.checkpoints(SECRET)
    return [token.name for token in ServiceTokens(api).all()] == ["admin"] and not made.pinned and not list(api.jobs())


def readable(said: dict[str, list[Any]]) -> list[str]:
    """What the page could read of the service."""
    return [name for name, (status, text) in said.items() if 200 <= status < 400 or SECRET in text]


DOORS = {
    "as it comes": (),
    "without tokens": ("--insecure-no-tokens",),
    "for all who reach it": ("--insecure-no-tokens", "0.0.0.0:0"),
    "behind TLS": ("--behind-tls", "--metrics-open", "0.0.0.0:0"),
}


@pytest.mark.parametrize("door", DOORS)
def test_other_sites_pages_get_nowhere(browser: Browser, tmp_path: Path, door: str) -> None:
    """By a name that was made to point here, and from another origin, in a browser that is signed in: no answer is read,
    and nothing has changed.
    """
    flags = [flag for flag in DOORS[door] if flag.startswith("--")]
    listen = next((flag for flag in DOORS[door] if not flag.startswith("--")), "127.0.0.1:0")
    with attacked(tmp_path / "root", *flags, listen=listen) as (daemon, api, admin):
        here = local(daemon)
        port = here.rpartition(":")[2]
        signed_in = (here, admin)
        rebound = page_of(browser, f"http://{EVIL}:{port}", signed_in)
        said = rebound.evaluate(ASK, ["", READS, WRITES])
        assert len(said) == 2 * len(READS) + 2 * len(WRITES)
        assert readable(said) == [] and {status for status, _ in said.values()} <= {0, 401, 403}, said
        assert untouched(api)
        crossing = page_of(browser, "http://other.example", signed_in)
        said = crossing.evaluate(ASK, [here, READS, WRITES])
        assert readable(said) == [] and {status for status, _ in said.values()} == {0}, said
        assert untouched(api)


def test_the_attack_is_one(browser: Browser, tmp_path: Path) -> None:
    """Where the attacker's name is allowed, the same page reads and writes: the test above would see it."""
    with attacked(tmp_path / "root", "--insecure-no-tokens", "--allowed-hosts", EVIL) as (daemon, api, _):
        page = page_of(browser, f"http://{EVIL}:{daemon.url.rpartition(':')[2]}")
        said = page.evaluate(ASK, ["", READS, WRITES])
        assert {"GET /v1/runs", "GET /healthz", "GET /"} <= set(readable(said))
        assert not untouched(api)
