"""People whom a login proxy lets in: a real proxy before a real service, and everybody who only says so."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import Forbidden, InvalidRequest
from holdfast_formats.rest.access import Grant, matches
from holdfast_service.api.access import logins
from holdfast_service.api.access.authentication import Policy
from holdfast_service.control.access.tokens import of_person
from tests.api.guarded import CHECKPOINT, Guarded, code, guarded
from tests.api.login_proxy import Person, login_proxy
from tests.attack.sockets import ask

SECRET = "s" * 40
PEOPLE = {
    "ann": Person("ann@lab.example", "team-a,users"),
    "max": Person("max@lab.example", "team-a,readers"),
    "zoë": Person("zoë@lab.example", "ops, users"),
    "eve": Person("eve@lab.example", "strangers"),
    "sub": Person("", "team-a", "subject-17"),
}
FILE: dict[str, Any] = {
    "proxies": ["127.0.0.1"],
    "secret_file": "secret",
    "groups": {
        "team-a": {"scope": "write", "runs": "team-a*"},
        "readers": {"scope": "read", "runs": "*"},
        "ops": {"scope": "admin", "runs": "*"},
    },
    "logout": "/oauth2/sign_out",
}
SHOWN = {"X-Forwarded-Email": "zoe@lab.example", "X-Forwarded-Groups": "ops"}
_CONTEXT = ssl.create_default_context()


def written(directory: Path, **changes: Any) -> Path:
    (directory / "secret").write_text(SECRET + "\n")
    (directory / "secret").chmod(0o600)
    path = directory / "logins.json"
    path.write_text(json.dumps({**FILE, **changes}))
    return path


class Site(NamedTuple):
    """A service that believes a proxy, and that proxy."""

    guard: Guarded
    url: str

    def ask(self, who: str, method: str, path: str, **parts: Any) -> httpx.Response:
        headers = {"Cookie": f"_oauth2_proxy={who}".encode(), "Accept": "*/*", **parts.pop("headers", {})}
        return httpx.request(
            method, self.url + path, headers=headers, trust_env=False, timeout=180, verify=_CONTEXT, **parts
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("logins")
    policy = Policy(tokens=True, logins=logins.load(written(directory)))
    with guarded(directory / "root", policy) as guard, login_proxy(guard.running.url, _latin(PEOPLE), SECRET) as url:
        yield Site(guard, url)


def _latin(people: dict[str, Person]) -> dict[str, Person]:
    return {name.encode().decode("latin-1"): person for name, person in people.items()}


def test_a_person_is_known_by_name(site: Site) -> None:
    """Not by a token: in the API, on the pages, and in the audit log."""
    ann = site.ask("ann", "GET", "/v1/whoami").json()
    assert (ann["name"], ann["by"], ann["scope"], ann["runs"]) == ("ann@lab.example", "login", "write", "team-a*")
    assert site.ask("zoë", "GET", "/v1/whoami").json()["name"] == "zoë@lab.example"
    assert site.ask("sub", "GET", "/v1/whoami").json()["name"] == "subject-17"
    page = site.ask("ann", "GET", "/").text
    assert "ann@lab.example" in page and "/runs/team-a" in page and "/runs/team-b" not in page and "Sign out" in page
    pinned = site.ask("ann", "POST", "/runs/team-a/checkpoints/5/pin", headers={"Sec-Fetch-Site": "same-origin"})
    assert pinned.status_code == 303
    told = site.guard.ask("GET", "/v1/audit", site.guard.token("admin"), params={"kind": "pin-set"}).json()["items"]
    assert [(one["who"], one["by"], one["via"]) for one in told] == [("ann@lab.example", "login", "dashboard")]


def test_a_name_ends_with_any_letter(site: Site) -> None:
    """Also where the last byte of its UTF-8 is what Python takes for space: à, 者, Å."""
    get = partial(httpx.get, trust_env=False, verify=_CONTEXT)
    for person in ("voilà", "开发者", "Å"):
        headers = {b"X-Holdfast-Proxy-Secret": SECRET.encode(), b"X-Forwarded-Groups": f"{person},ops".encode()}
        headers[b"X-Forwarded-Email"] = person.encode()
        answer = get(site.guard.running.url + "/v1/whoami", headers=headers)
        assert (answer.status_code, answer.json()["name"]) == (200, person)
        page = get(site.guard.running.url + "/runs/team-a", headers=headers)
        assert page.status_code == 200 and person in page.text


def test_groups_are_scopes_and_runs(site: Site) -> None:
    """A person has what all groups give together, and never one group's scope for another one's runs."""
    assert code(site.ask("eve", "GET", "/v1/runs")) == (403, "forbidden")
    assert [run["name"] for run in site.ask("ann", "GET", "/v1/runs").json()["items"]] == ["team-a"]
    assert len(site.ask("max", "GET", "/v1/runs").json()["items"]) == 3
    origin = {"Sec-Fetch-Site": "same-origin"}
    assert site.ask("max", "PUT", f"{CHECKPOINT}/pin", headers=origin).status_code == 204
    assert code(site.ask("max", "PUT", "/v1/runs/team-b/checkpoints/5/pin", headers=origin))[0] == 403
    assert code(site.ask("max", "DELETE", CHECKPOINT, headers=origin))[0] == 403
    job = {"kind": "verify", "run": "team-a", "step": 5}
    assert site.ask("max", "POST", "/v1/jobs", json=job, headers=origin).status_code in (200, 202)
    assert code(site.ask("max", "POST", "/v1/jobs", json={**job, "run": "team-b"}, headers=origin))[0] == 403
    assert site.ask("zoë", "GET", "/v1/tokens").status_code == 200
    assert 'action="/runs/team-a/checkpoints/5/pin"' in site.ask("max", "GET", "/runs/team-a").text
    assert 'action="/runs/team-b/checkpoints/5/pin"' not in site.ask("max", "GET", "/runs/team-b").text


def test_another_sites_page_changes_nothing(site: Site) -> None:
    """The proxy's cookie goes along with every request of the browser, as our own would."""
    for headers in ({}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://attacker.example"}):
        assert code(site.ask("zoë", "PUT", f"{CHECKPOINT}/pin", headers=headers)) == (403, "forbidden")


def test_signing_out(site: Site) -> None:
    """Leads to where the proxy ends the session."""
    answer = site.ask("ann", "POST", "/logout", headers={"Sec-Fetch-Site": "same-origin"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/oauth2/sign_out")


def test_a_token_goes_through_the_proxy(site: Site) -> None:
    """Whoever shows one is who the token says, behind the proxy too."""
    headers = {"Authorization": f"Bearer {site.guard.token('read', 'team-b')}"}
    assert site.ask("zoë", "GET", "/v1/whoami", headers=headers).json()["by"] == "token"


@pytest.mark.parametrize(
    "headers",
    [
        SHOWN,
        {**SHOWN, "X-Holdfast-Proxy-Secret": "t" * 40},
        {**SHOWN, "X-Holdfast-Proxy-Secret": ""},
        {"X-Holdfast-Proxy-Secret": SECRET[:-1]},
        {"X-Forwarded-User": "root"},
        {"X-Forwarded-Groups": "ops"},
    ],
)
def test_whoever_only_says_so_is_refused(site: Site, headers: dict[str, str]) -> None:
    """The same address as the proxy's, without its secret: on every kind of path, with a good token too."""
    for path in ("/v1/runs", "/", "/healthz", "/login"):
        assert code(site.guard.ask("GET", path, headers=headers)) == (403, "forbidden")
    assert code(site.guard.ask("GET", "/v1/runs", site.guard.token(), headers=headers)) == (403, "forbidden")


def test_what_a_browser_adds_is_dropped_or_refused(site: Site) -> None:
    """The proxy of this test drops it, as oauth2-proxy does; and of two headers none is believed."""
    assert site.ask("ann", "GET", "/v1/whoami", headers=SHOWN).json()["name"] == "ann@lab.example"
    good = [("X-Holdfast-Proxy-Secret", SECRET), *SHOWN.items()]
    assert ask(site.guard.running.url, "GET", "/v1/runs", good).status == 200
    for name, value in (*good, ("X-Auth-Request-Email", "a@b"), ("X-Forwarded-User", "a")):
        twice = [*[one for one in good if one[0] != name], (name, value), (name, "other")]
        assert ask(site.guard.running.url, "GET", "/v1/runs", twice).status == 400, name


def test_the_other_family_says_nothing(site: Site) -> None:
    """X-Auth-Request-… is not what this service was told to read."""
    headers = {"X-Auth-Request-Email": "zoe@lab.example", "X-Auth-Request-Groups": "ops", "X-Holdfast-Proxy-Secret": SECRET}
    assert code(site.guard.ask("GET", "/v1/runs", headers=headers)) == (401, "unauthenticated")


def loaded(directory: Path, **changes: Any) -> logins.Logins:
    return logins.load(written(directory, **changes))


GOOD = {"x-holdfast-proxy-secret": SECRET, "x-forwarded-email": "ann@lab.example", "x-forwarded-groups": "ops"}


@pytest.mark.parametrize(
    ("peer", "believed"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("10.2.0.1", False),
        ("fd00::7", True),
        ("fd00::7%eth0", True),
        ("fd01::7", False),
        ("127.0.0.1", False),
        ("somebody", False),
        ("", False),
    ],
)
def test_addresses(tmp_path: Path, peer: str, believed: bool) -> None:
    """The secret is not enough from elsewhere."""
    known = loaded(tmp_path, proxies=["10.1.0.0/16", "fd00::/64"])
    if believed:
        assert known.read(GOOD, peer) is not None
    else:
        with pytest.raises(Forbidden):
            known.read(GOOD, peer)


def test_everybody_whom_the_proxy_lets_in(tmp_path: Path) -> None:
    """May have a scope without any group; and who is not logged in at a path that the proxy leaves open is nobody."""
    known = loaded(tmp_path, everybody={"scope": "read"}, groups={})
    person = known.read({**GOOD, "x-forwarded-groups": ""}, "127.0.0.1")
    assert person is not None and (person.scope, person.runs) == ("read", "*")
    assert known.read({"x-holdfast-proxy-secret": SECRET}, "127.0.0.1") is None
    for name in ("a\nb", "x" * 200, "\xff"):
        with pytest.raises(InvalidRequest):
            known.read({**GOOD, "x-forwarded-email": name}, "127.0.0.1")


def test_limits_are_each_person_s(tmp_path: Path) -> None:
    """Everybody comes from the proxy's address, and has limits of their own all the same; a page counts as one request."""
    policy = Policy(tokens=True, logins=logins.load(written(tmp_path, requests_per_s=1)))
    with guarded(tmp_path / "root", policy) as guard:

        def ask(who: str, path: str = "/v1/whoami") -> httpx.Response:
            headers = {"X-Forwarded-Email": who, "X-Forwarded-Groups": "team-a", "X-Holdfast-Proxy-Secret": SECRET}
            return guard.ask("GET", path, headers=headers)

        assert ask("ann@lab.example", "/runs/team-a").status_code == 200
        answers = [ask("ann@lab.example") for _ in range(50)]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert refused and code(refused[0]) == (429, "too-many-requests") and int(refused[0].headers["retry-after"]) >= 1
        assert "--logins" in refused[0].json()["hint"] and "token" not in refused[0].json()["detail"]
        assert ask("max@lab.example").status_code == 200
        assert guard.ask("GET", "/v1/whoami", guard.token()).status_code == 200


def test_what_is_no_file_is_said_so(tmp_path: Path) -> None:
    """And nothing waits for a FIFO to be written to."""
    os.mkfifo(tmp_path / "fifo")
    for wrong, why in (("fifo", "not a file"), (".", "not a file"), ("nowhere", "No such file")):
        with pytest.raises(InvalidRequest, match=why):
            logins.load(tmp_path / wrong)
        with pytest.raises(InvalidRequest, match=why):
            logins.load(written(tmp_path, secret_file=wrong))


@pytest.mark.parametrize(
    "changes",
    [
        {"proxies": []},
        {"proxies": ["0.0.0.0/0"]},
        {"proxies": ["proxy.example"]},
        {"secret_file": "nothing-here"},
        {"groups": {}},
        {"groups": {"a": {"scope": "root"}}},
        {"groups": {"a,ops": {"scope": "read"}}},
        {"groups": {" a": {"scope": "read"}}},
        {"groups": {"": {"scope": "read"}}},
        {"groups": {"a": {"scope": "read", "runs": "*-x"}}},
        {"groups": {"a": {"scope": "read", "runs": "a,b"}}},
        {"headers": "Remote"},
        {"logout": "https://attacker.example/"},
        {"logout": "//attacker.example/"},
        {"secret": "in here"},
        {"requests_per_s": 0},
        {"bytes_per_s": "1GB"},
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    """At the start, with what to do."""
    with pytest.raises(InvalidRequest) as caught:
        loaded(tmp_path, **changes)
    assert caught.value.hint


def test_a_secret_is_one(tmp_path: Path) -> None:
    """Not short, not a binary, and a file that is no JSON is no file of logins."""
    path = written(tmp_path)
    (tmp_path / "secret").write_text("short")
    with pytest.raises(InvalidRequest, match="secret"):
        logins.load(path)
    for text in (b"{", b"[" * 100_000, b'{"groups": {}, "groups": {}}', b'{"proxies": ["\xff"]}'):
        path.write_bytes(text)
        with pytest.raises(InvalidRequest, match="JSON"):
            logins.load(path)


_GRANTS = st.lists(
    st.builds(Grant, scope=st.sampled_from(("read", "write", "admin")), runs=st.sampled_from(("*", "a*", "a1", "b*", "b1"))),
    min_size=1,
    max_size=4,
)


@given(
    _GRANTS,
    st.sampled_from(("read", "write", "admin")),
    st.lists(st.sampled_from(("a1", "a2", "b1", "c", None)), max_size=2),
)
def test_grants_are_never_more_than_their_sum(grants: list[Grant], needed: Any, about: list[str | None]) -> None:
    """In no request has a person a scope for a run that no grant gives; and where one grant gives it, it is given."""
    person = of_person("x", grants)
    counted = person.for_request(needed, about)
    for run in ("a1", "a2", "b1", "b2", "c"):
        if counted.may(needed) and matches(counted.runs, run):
            for scope in ("read", "write", "admin"):
                assert not counted.may(scope) or person.allows(scope, run), (counted, run)  # type: ignore[arg-type]
    if len(about) == 1:
        (run,) = about
        reached = counted.may(needed) and (counted.sees_all if run is None else counted.sees(run))
        assert reached == person.allows(needed, run)
