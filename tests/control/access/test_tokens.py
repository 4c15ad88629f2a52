"""Tokens: what is kept of them, who they are, and when they are in force no more. And which runs a session sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast_formats import timestamps
from holdfast_formats.errors import Forbidden, InvalidRequest, NoSpace, NoSuchResource, NoSuchRun, Unauthenticated
from holdfast_formats.rest.access import matches
from holdfast_formats.rest.operations import RotationRequest, TokenRequest
from holdfast_service.control.access import tokens
from holdfast_service.control.access.tokens import Principal, Tokens
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.schema import TokenRow
from holdfast_service.control.database.visible import covers, joined, limited_to
from holdfast_service.control.insight.summary_queries import EVERY_RUN, Summaries
from holdfast_service.storage import MemoryTier, stored_in
from tests.databases import sqlite_url

NOW = "2026-01-01T00:00:00.000Z"


class World:
    """Tokens over a catalog, and a clock."""

    def __init__(self, path: Path) -> None:
        self.catalog = Catalog.open(sqlite_url(path))
        self.now = NOW
        self.events = Events(self.catalog.database, "node-1", lambda: self.now)
        self.tokens = Tokens(self.catalog.database, self.events, lambda: self.now)

    def row(self, name: str) -> TokenRow:
        with self.catalog.database.read() as session:
            (found,) = (row for row in session.query(TokenRow) if row.name == name)
            return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "catalog.sqlite")
    yield made
    made.catalog.close()


def test_a_token_is_known_by_its_digest_alone(world: World, tmp_path: Path) -> None:
    """Its text is told once; what is kept is SHA-256, and the events tell the name."""
    made = world.tokens.create(TokenRequest(name="ci", scope="write", runs="team-*"))
    assert world.tokens.verify(made.token) == Principal("ci", "write", "team-*", 1)
    world.catalog.close()
    for path in tmp_path.iterdir():
        assert made.token.encode() not in path.read_bytes() and made.token[3:].encode() not in path.read_bytes()
    assert [(e.kind, e.detail["token"]) for e in world.events.after(0, 9)] == [("token-changed", "ci")]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text + "A",
        lambda text: text.removeprefix("hf_"),
        lambda text: "hf_" + text[3:].swapcase(),
        lambda text: text[:10] + ("A" if text[10] != "A" else "B") + text[11:],
        lambda text: "hf_" + "é" * 48,
        lambda text: "hf_" + "=" * 48,
        lambda text: text + "\x00",
        lambda text: "A" * 100_000,
    ],
)
def test_what_is_no_token_is_told_without_the_database(world: World, spoil) -> None:
    """The CRC tells what was cut or mistyped; nothing is asked for it."""
    text = spoil(world.tokens.create(TokenRequest(name="a")).token)
    world.catalog.close()
    assert not tokens.well_formed(text)
    with pytest.raises(Unauthenticated) as caught:
        world.tokens.verify(text)
    assert caught.value.hint and (not text or text not in str(caught.value))


def test_a_token_of_another_catalog(world: World) -> None:
    """One that is well formed and that nobody made here is not known."""
    with pytest.raises(Unauthenticated, match="unknown token"):
        world.tokens.verify(tokens.make_text())


def test_tokens_end(world: World) -> None:
    """By revocation at once, by time at the moment; then the name is free for another."""
    kept = world.tokens.create(TokenRequest(name="kept"))
    short = world.tokens.create(TokenRequest(name="short", expires_s=60))
    assert world.tokens.verify(short.token).name == "short"
    with pytest.raises(InvalidRequest, match="a token named 'short' already exists"):
        world.tokens.create(TokenRequest(name="short"))
    world.now = "2026-01-01T00:01:00.000Z"
    with pytest.raises(Unauthenticated, match="expired"):
        world.tokens.verify(short.token)
    assert world.tokens.verify(world.tokens.create(TokenRequest(name="short")).token).name == "short"
    world.tokens.revoke("kept")
    world.tokens.revoke("kept")
    with pytest.raises(Unauthenticated, match="revoked"):
        world.tokens.verify(kept.token)
    with pytest.raises(NoSuchResource):
        world.tokens.revoke("nobody")


def test_a_full_disk_keeps_nobody_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a token was used cannot be noted then; whoever makes room needs one."""
    made = world.tokens.create(TokenRequest(name="ci", scope="admin"))

    @contextmanager
    def full() -> Iterator[None]:
        raise NoSpace("no space is left")
        yield

    monkeypatch.setattr(world.catalog.database, "write", full)
    assert world.tokens.verify(made.token).name == "ci"


def test_use_is_noted_once_a_minute(world: World) -> None:
    """A token that is used all the time costs one write a minute."""
    made = world.tokens.create(TokenRequest(name="a"))
    for now, noted in (("00:10.000", "00:10.000"), ("00:50.000", "00:10.000"), ("01:10.000", "01:10.000")):
        world.now = f"2026-01-01T00:{now}Z"
        world.tokens.verify(made.token)
        assert world.row("a").used == f"2026-01-01T00:{noted}Z"


def test_pages_of_tokens(world: World) -> None:
    """Newest first, revoked ones among them, never a text or a digest."""
    for name in "abc":
        world.tokens.create(TokenRequest(name=name))
    world.tokens.revoke("b")
    first = world.tokens.page(None, 2)
    assert [(t.name, t.revoked) for t in first.items] == [("c", None), ("b", NOW)]
    assert [t.name for t in world.tokens.page(first.next, 2).items] == ["a"]
    assert {"token", "digest"}.isdisjoint(first.items[0].model_dump())


@pytest.mark.parametrize("runs", ["r" * 128, "r" * 127 + "*", "r", "*"])
def test_any_run_has_a_pattern(runs: str) -> None:
    """Names of any length that a run may have, and nothing longer."""
    assert tokens.check_pattern(runs) == runs
    with pytest.raises(InvalidRequest):
        tokens.check_pattern("r" * (129 - len(runs)) + runs)


@pytest.mark.parametrize("runs", ["", "**", "a*b", "*a", "-a", "a b", "../x", "a/b", "é*"])
def test_patterns_that_are_none(world: World, runs: str) -> None:
    """Only a run's name, a prefix with a star behind it, or a star."""
    with pytest.raises(InvalidRequest):
        world.tokens.create(TokenRequest(name="a", runs=runs))
    assert world.tokens.page(None, 9).items == []


def test_scopes_include_those_before_them() -> None:
    """admin may write, write may read, not the other way round; runs are a question of their own."""
    writer = Principal("w", "write", "team-*")
    writer.require("read")
    writer.require("write")
    writer.require_run("team-a")
    for refused in (lambda: writer.require("admin"), lambda: writer.require_run("other"), lambda: writer.require_run(None)):
        with pytest.raises(Forbidden) as caught:
            refused()
        assert caught.value.hint


def test_a_limited_session_sees_its_runs_alone(world: World) -> None:
    """In lists, pages, counts, single look-ups and events; names that LIKE would mix up are kept apart."""
    catalog, summaries = world.catalog, Summaries(stored_in(MemoryTier()).store, world.catalog)
    for run in ("Team-c", "a_b", "axb", "team-a", "team-b", "zoo"):
        catalog.declare_attempt(run, "launch", 1, NOW)
        catalog.rounds.open(run, 1, 1, 1, NOW)
        world.events.add("attempt-declared", "one", run)
    world.events.add("daemon-started", "of no run")
    with limited_to("team-*"):
        first = summaries.names(None, 1, EVERY_RUN)
        assert first.items == ["team-a"]
        assert summaries.names(first.next, 5, EVERY_RUN).items == ["team-b"]
        assert [run.name for run in summaries.runs(["zoo", "team-a"])] == ["team-a"]
        assert sorted(made.run for made in catalog.rounds.page().items) == ["team-a", "team-b"]
        assert [event.run for event in world.events.after(0, 99)] == ["team-a", "team-b"]
        assert catalog.rounds.counts()["open"] == 2
        assert catalog.newest_attempt("zoo") == 0
        for call in (
            lambda: catalog.run("zoo"),
            lambda: catalog.checkpoints("zoo", None, 1),
            lambda: catalog.rounds.page("zoo"),
        ):
            with pytest.raises(NoSuchRun):
                call()
    with limited_to("a_*"):
        assert summaries.names(None, 5, EVERY_RUN).items == ["a_b"]
    with limited_to("team"):
        assert summaries.names(None, 5, EVERY_RUN).items == []
    assert len(summaries.names(None, 9, EVERY_RUN).items) == 6


def test_a_rotated_token_has_two_secrets_for_a_while(world: World) -> None:
    """The new one at once, the old one until the grace is over; name, scope, runs and limits are the same."""
    first = world.tokens.create(
        TokenRequest(name="ci", scope="write", runs="team-*", expires_s=86_400 * 10, requests_per_s=5)
    )
    world.now = timestamps.later(NOW, 3600)
    second = world.tokens.rotate("ci", RotationRequest(grace_s=600))
    assert second.token != first.token and second.requests_per_s == 5
    assert second.expires == timestamps.later(world.now, 86_400 * 10)
    for text in (first.token, second.token):
        assert world.tokens.verify(text, "10.0.0.7")[:3] == ("ci", "write", "team-*")
    assert {row.used_from for row in world.tokens.page(None, 9).items} == {"10.0.0.7"}
    world.now = timestamps.later(world.now, 601)
    with pytest.raises(Unauthenticated, match="expired"):
        world.tokens.verify(first.token)
    assert world.tokens.verify(second.token).name == "ci"
    assert world.events.after(0, 9)[-1].detail["change"] == "rotated"


def test_a_grace_is_never_longer_than_the_token_had(world: World) -> None:
    """The old secret ends when it would have; and a second rotation ends both older ones."""
    first = world.tokens.create(TokenRequest(name="ci", expires_s=60))
    second = world.tokens.rotate("ci", RotationRequest(grace_s=86_400, expires_s=86_400))
    third = world.tokens.rotate("ci", RotationRequest(grace_s=0))
    for old in (first.token, second.token):
        with pytest.raises(Unauthenticated):
            world.tokens.verify(old)
    assert world.tokens.verify(third.token).name == "ci"


def test_revoking_ends_every_secret(world: World) -> None:
    """Those in their grace too; and there is nothing to rotate then."""
    first = world.tokens.create(TokenRequest(name="ci"))
    second = world.tokens.rotate("ci", RotationRequest())
    world.tokens.revoke("ci")
    for text in (first.token, second.token):
        with pytest.raises(Unauthenticated, match="revoked"):
            world.tokens.verify(text)
    for name in ("ci", "nobody"):
        with pytest.raises(NoSuchResource):
            world.tokens.rotate(name, RotationRequest())
    world.tokens.revoke("ci")  # safe to repeat


@pytest.mark.parametrize(
    ("pattern", "other", "covered"),
    [
        ("*", "a*", True),
        ("a*", "*", False),
        ("a*", "ab*", True),
        ("ab*", "a*", False),
        ("a*", "a1", True),
        ("a1", "a1", True),
        ("a1", "a1*", False),
        ("a*,b1", "a2", True),
        ("a*,b1", "b*", False),
        ("a1,b*", "a1,b2", True),
    ],
)
def test_patterns_that_are_inside_others(pattern: str, other: str, covered: bool) -> None:
    """Whoever sees all runs of the one sees all runs of the other."""
    assert covers(pattern, other) is covered
    runs = ("a", "a1", "a2", "ab", "b", "b1", "b2", "c")
    if covered:
        assert all(matches(pattern, run) for run in runs if matches(other, run))


def test_several_patterns_at_once(world: World) -> None:
    """As a person in several groups: the runs of each of them, in lists too."""
    for run in ("a-1", "a-2", "b-1", "c"):
        world.catalog.declare_attempt(run, "launch", 1, NOW)
    with limited_to(joined(["a-*", "c", "a-*"])):
        assert Summaries(stored_in(MemoryTier()).store, world.catalog).names(None, 10, EVERY_RUN).items == [
            "a-1",
            "a-2",
            "c",
        ]
    assert joined(["a-*", "*"]) == "*"
