"""Bearer tokens: create, list, revoke and verify. Only their SHA-256 is stored.

A token's text is `hf_`, 32 random bytes and a CRC-32 of them, in URL-safe base64. The CRC is not secret: it
detects cut or mistyped tokens without a database query.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import re
import secrets
import time
import zlib
from collections.abc import Callable, Collection
from typing import NamedTuple, get_args

from sqlalchemy import or_, select, update

from holdfast_formats import naming, timestamps
from holdfast_formats.errors import (
    CatalogUnavailable,
    CheckpointError,
    Forbidden,
    InvalidRequest,
    NoSuchResource,
    Unauthenticated,
)
from holdfast_formats.rest import bodies
from holdfast_formats.rest.access import ALL, By, Grant, matches
from holdfast_formats.rest.operations import NewToken, RotationRequest, Scope, Token, TokenRequest
from holdfast_service.control.access.owner import SESSION_PREFIX, Owner, digest
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.pages import bounded, decode_cursor, integer, page
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import TokenRow
from holdfast_service.control.database.visible import joined

log = logging.getLogger(__name__)

PREFIX = "hf_"
SECRET_BYTES = 32
TEXT_CHARACTERS_MAX = 64
USED_EVERY_S = 60.0
TRUSTED_S, SEEN_MAX = 300.0, 1000  # while the catalog is away, a token that was in force so long ago still is
EXPIRES_MAX_S = 100 * 365 * 86_400
_SCOPES: tuple[Scope, ...] = get_args(Scope)  # each may what those before it may
_RUNS = re.compile(naming.RUN_PATTERN)
_SECRET = re.compile(r"h[fs]_[A-Za-z0-9_=-]{12,}")
_HINT = (
    "as the daemon's own user, use `holdfast`, which finds the daemon's token, or `holdfast open`, which signs a "
    "browser in; as another user, set HOLDFAST_TOKEN, or send `Authorization: Bearer …`, with a token that the "
    "daemon's user creates with `holdfast token create NAME`"
)


class Principal(NamedTuple):
    """The caller: the name of a token, or "" without authentication, and its scope and runs."""

    name: str
    scope: Scope
    runs: str = ALL
    token: int | None = None  # by which it was let in
    known: bool = True  # it is authenticated, or the address needs no token
    by: By = "token"
    expires: str | None = None
    requests_per_s: int | None = None
    bytes_per_s: int | None = None
    grants: tuple[Grant, ...] = ()  # of a person: what each group gives; `scope` and `runs` are what counts in a request
    session: str | None = None  # by which a browser was let in; its digest

    def sees(self, run: str) -> bool:
        return matches(self.runs, run)

    @property
    def sees_all(self) -> bool:
        return self.runs == ALL

    @property
    def granted(self) -> tuple[Grant, ...]:
        """All its grants."""
        return self.grants or (Grant(scope=self.scope, runs=self.runs),)

    def allows(self, scope: Scope, run: str | None) -> bool:
        """Whether some grant includes this scope for this run, or, with None, for all runs."""
        return any(
            _rank(one.scope) >= _rank(scope) and (one.runs == ALL if run is None else matches(one.runs, run))
            for one in self.granted
        )

    def for_request(self, needed: Scope, runs: Collection[str | None]) -> Principal:
        """The principal for one request about these runs (None: all): never more than its grants together allow.

        Where grants differ, the scope is the largest that some of them give for all of these runs, else the smallest that is
        sufficient; the runs are those of all grants of that scope or a larger one.
        """
        if len(self.grants) < 2:
            return self
        enough = [one for one in self.grants if _rank(one.scope) >= _rank(needed)]
        if not enough:
            return self  # its largest scope is not sufficient; the error says so
        fit = [one for one in enough if all(one.runs == ALL if run is None else matches(one.runs, run) for run in runs)]
        ranks = [_rank(one.scope) for one in (fit if runs else enough)] or [_rank(one.scope) for one in enough]
        scope = _SCOPES[max(ranks) if runs and fit else min(ranks)]
        return self._replace(scope=scope, runs=joined(one.runs for one in enough if _rank(one.scope) >= _rank(scope)))

    @property
    def tenant(self) -> str:
        """The tenant for fair shares, besides the run's: "" for an admin of all runs."""
        return "" if self.sees_all and self.scope == "admin" else f"tokens for the runs {self.runs!r}"

    def may(self, scope: Scope) -> bool:
        """Whether its scope is sufficient."""
        return _SCOPES.index(scope) <= _SCOPES.index(self.scope)

    def require(self, scope: Scope) -> None:
        """`Forbidden` if its scope is not sufficient."""
        if not self.may(scope):
            hint = f"use a token with the scope {scope!r}"
            raise Forbidden(
                f"the token {self.name} has scope {self.scope!r}, but this needs {scope!r}", hint=hint, needed=scope
            )

    def require_run(self, run: str | None) -> None:
        """`Forbidden` if it may not access this run, or, with None, all runs."""
        if not (self.sees_all if run is None else self.sees(run)):
            what = "all runs" if run is None else f"run {run!r}"
            raise Forbidden(f"the token {self.name} is for the runs {self.runs!r}, not for {what}", hint="use another token")


OWNER = Principal("the owner", "admin", by="owner")


class Tokens:
    """The tokens of one catalog. Thread-safe. `now` returns RFC 3339 text of one format, so that times compare as text."""

    def __init__(self, database: Database, events: Events, now: Callable[[], str], owner: Owner | None = None) -> None:
        self._database, self._events, self._now = database, events, now
        self._owner = owner
        self._seen: dict[
            str, tuple[Principal, float, str | None]
        ] = {}  # by digest, with how long it is trusted, and in force

    def create(self, wanted: TokenRequest) -> NewToken:
        """Create a token; only this answer contains its text. `InvalidRequest` for a used name or an invalid run pattern."""
        check_pattern(wanted.runs)
        _check_expiry(wanted.expires_s)
        text, now = make_text(), self._now()
        with self._database.write() as session:
            active = select(TokenRow.id).where(TokenRow.name == wanted.name, *_in_force(now)).limit(1)
            if session.scalar(active) is not None:
                raise InvalidRequest(
                    f"a token named {wanted.name!r} already exists", hint="revoke it first, or choose another name"
                )
            token_row = TokenRow(
                name=wanted.name,
                digest=digest(text),
                scope=wanted.scope,
                runs=wanted.runs,
                created=now,
                expires=None if wanted.expires_s is None else timestamps.later(now, wanted.expires_s),
                requests_per_s=wanted.requests_per_s,
                bytes_per_s=wanted.bytes_per_s,
            )
            session.add(token_row)
            session.flush()
            token = Token.model_validate(token_row, from_attributes=True)
        self._tell(token, "made")
        return NewToken(**token.model_dump(), token=text)

    def page(self, cursor: str | None, limit: int) -> bodies.Page[Token]:
        """A page of all tokens, newest first, including revoked and expired ones."""
        before = decode_cursor("token", cursor)
        wanted = select(TokenRow).order_by(TokenRow.id.desc()).limit(bounded(limit) + 1)
        if before is not None:
            wanted = wanted.where(TokenRow.id < integer(before))
        with self._database.read() as session:
            tokens = [Token.model_validate(row, from_attributes=True) for row in session.scalars(wanted)]
        return page("token", tokens, limit, lambda token: token.id)

    def revoke(self, name: str) -> None:
        """Revoke the token of this name with all its secrets; idempotent. `NoSuchResource` if it does not exist."""
        with self._database.write() as session:
            rows = list(session.scalars(select(TokenRow).where(TokenRow.name == name).order_by(TokenRow.id.desc())))
            if not rows:
                raise NoSuchResource(f"there is no token named {name!r}", hint="list tokens with `holdfast token ls`")
            ended = [row for row in rows if row.revoked is None]
            for row in ended:
                row.revoke(self._now())
            token = Token.model_validate(rows[0], from_attributes=True)
        self._seen.clear()  # after requests that have read the old value
        if ended:
            self._tell(token, "revoked")

    def rotate(self, name: str, wanted: RotationRequest) -> NewToken:
        """Give the token of this name a new secret; the old one expires after the grace period, or when it would have
        anyway.

        `NoSuchResource` if no token of this name is in force.
        """
        _check_expiry(wanted.expires_s)
        text, now = make_text(), self._now()
        end = timestamps.later(now, wanted.grace_s)
        with self._database.write() as session:
            asked = select(TokenRow).where(TokenRow.name == name, *_in_force(now)).order_by(TokenRow.id.desc())
            rows = list(session.scalars(asked))
            if not rows:
                raise NoSuchResource(
                    f"there is no valid token named {name!r}", hint="create one with `holdfast token create`"
                )
            before = rows[0]
            token_row = TokenRow(
                name=name,
                digest=digest(text),
                scope=before.scope,
                runs=before.runs,
                created=now,
                expires=_expiry(before, wanted.expires_s, now),
                requests_per_s=before.requests_per_s,
                bytes_per_s=before.bytes_per_s,
            )
            for row in rows:  # one of them may be in the grace of an earlier rotation
                row.expire_by(end)
            session.add(token_row)
            session.flush()
            token = Token.model_validate(token_row, from_attributes=True)
        self._seen.clear()
        self._tell(token, "rotated")
        return NewToken(**token.model_dump(), token=text)

    def verify(self, text: str, address: str = "") -> Principal:
        """The caller that this token or session authenticates, from that address; `Unauthenticated` if it is unknown or
        expired.

        The owner's token needs no catalog.
        """
        if self._owner is not None and text.startswith(SESSION_PREFIX):
            return self.verify(self._owner.links.token_of(text), address)._replace(session=digest(text))
        if self._owner is not None and self._owner.is_shown(text):
            return OWNER
        if not well_formed(text):
            raise Unauthenticated("this is not a Holdfast token", hint=_HINT)
        try:
            principal, expires = self._looked_up(text, address)
        except CatalogUnavailable:
            known = self._seen.get(digest(text))
            if known is None or time.monotonic() > known[1] or (known[2] is not None and known[2] <= self._now()):
                raise
            return known[0]
        self._seen[digest(text)] = principal, time.monotonic() + TRUSTED_S, expires
        while len(self._seen) > SEEN_MAX:
            self._seen.pop(next(iter(self._seen)), None)
        return principal

    def verify_kept(self, text: str, address: str) -> Principal:
        """As `verify`, for a token that a browser keeps."""
        principal = self.verify(text, address)
        if self._owner is None or principal.session is not None:
            return principal
        return principal._replace(session=self._owner.links.kept(text))

    def _looked_up(self, text: str, address: str) -> tuple[Principal, str | None]:
        wanted, now = digest(text), self._now()
        with self._database.read() as session:
            row = session.scalar(select(TokenRow).where(TokenRow.digest == wanted))
            if row is None or not hmac.compare_digest(row.digest, wanted):
                raise Unauthenticated("unknown token", hint=_HINT)
            if row.revoked is not None:
                raise Unauthenticated(f"the token {row.name!r} has been revoked", hint=_HINT)
            if row.expires is not None and row.expires <= now:
                raise Unauthenticated(f"the token {row.name!r} has expired", hint=_HINT)
            principal = Principal(row.name, _scope(row.scope), row.runs, row.id, expires=row.expires)
            principal = principal._replace(requests_per_s=row.requests_per_s, bytes_per_s=row.bytes_per_s)
            token_id, used, expires = row.id, row.used, row.expires
        if used is None or timestamps.later(used, USED_EVERY_S) <= now:
            self._note_use(token_id, now, address)
        return principal, expires

    def in_force(self, ids: Collection[int]) -> set[int]:
        """Which of these tokens are still valid."""
        with self._database.read() as session:
            return set(session.scalars(select(TokenRow.id).where(TokenRow.id.in_(ids), *_in_force(self._now()))))

    def sessions_in_force(self, known: Collection[str]) -> set[str]:
        """Which of these sessions, by digest, have not ended."""
        return set() if self._owner is None else self._owner.links.in_force(known)

    def _note_use(self, token_id: int, now: str, address: str) -> None:
        try:
            with self._database.write() as session:
                used = update(TokenRow).where(TokenRow.id == token_id)
                session.execute(used.values(used=now, used_from=address[:64] or TokenRow.used_from))
        except CheckpointError as error:  # a full disk must not lock out callers, least of all one that frees space
            log.debug("cannot record that token %d was used: %s", token_id, error.detail)

    def _tell(self, token: Token, what: str) -> None:
        text = f"the token {token.name!r} was {what}"
        self._events.add("token-changed", text, token=token.name, scope=token.scope, runs=token.runs, change=what)


def missing() -> Unauthenticated:
    """The error for a caller without a required token."""
    return Unauthenticated("this needs a token", hint=_HINT)


def make_text() -> str:
    secret = secrets.token_bytes(SECRET_BYTES)
    return PREFIX + base64.urlsafe_b64encode(secret + zlib.crc32(secret).to_bytes(4, "big")).decode()


def without_secrets(text: str) -> str:
    """A client's text for logs, without tokens that it contains by mistake."""
    return _SECRET.sub("hf_…", text)


def well_formed(text: str) -> bool:
    """Whether a text has the format and CRC of a token."""
    if len(text) > TEXT_CHARACTERS_MAX or not (text.isascii() and text.startswith(PREFIX)):
        return False
    try:
        decoded = base64.b64decode(text.removeprefix(PREFIX), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return False
    secret, check = decoded[:SECRET_BYTES], decoded[SECRET_BYTES:]
    return len(check) == 4 and zlib.crc32(secret).to_bytes(4, "big") == check


def _in_force(now: str):  # type: ignore[no-untyped-def]
    return TokenRow.revoked.is_(None), or_(TokenRow.expires.is_(None), TokenRow.expires > now)


def _rank(scope: Scope) -> int:
    return _SCOPES.index(scope)


def _check_expiry(expires_s: int | None) -> None:
    if expires_s is not None and expires_s > EXPIRES_MAX_S:
        hint = "leave it out for a token that never expires"
        raise InvalidRequest(f"a token expires after at most {EXPIRES_MAX_S} seconds", hint=hint)


def _expiry(before: TokenRow, expires_s: int | None, now: str) -> str | None:
    """When a rotated token expires: after the lifetime of the old one, unless another is requested."""
    if expires_s is None and before.expires is not None:
        return timestamps.later(now, timestamps.seconds_of(before.expires) - timestamps.seconds_of(before.created))
    return None if expires_s is None else timestamps.later(now, expires_s)


def check_pattern(runs: str) -> str:
    """The pattern; `InvalidRequest` if it is none."""
    if _RUNS.fullmatch(runs) is None:
        raise InvalidRequest(
            f"{runs!r} is not a valid pattern of runs", hint="give a run's name, a prefix ending in *, or *"
        )
    return runs


def of_person(name: str, grants: Collection[Grant]) -> Principal:
    """A person authenticated by a proxy, with the grants of their groups; at least one."""
    largest = max(grants, key=lambda one: _rank(one.scope))
    every = tuple(sorted(set(grants), key=lambda one: (-_rank(one.scope), one.runs)))
    return Principal(name, largest.scope, joined(one.runs for one in every), by="login", grants=every)


def _scope(text: str) -> Scope:
    return next(scope for scope in _SCOPES if scope == text)
