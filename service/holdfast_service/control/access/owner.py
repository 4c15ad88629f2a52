"""The daemon's owner: a token created at the start and kept in memory, and one-time sign-in links for a browser.

Of tokens, codes and sessions only digests are kept; they are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Collection

from holdfast_formats.errors import Unauthenticated

SESSION_PREFIX = "hs_"
CODE_BYTES = 32
LINK_WAIT_MAX_S = 60.0
SESSION_MAX_S = 7 * 86_400.0
LINKS_MAX = 64
SESSIONS_MAX = 256
SIGNED_OUT_MAX = 1024


class Links:
    """One-time codes, valid for a minute, and the sessions that they become. Thread-safe.

    A session has the rights of the token that created its link, and ends with it, or with the daemon.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._signed_out: OrderedDict[str, int] = OrderedDict()  # tokens that browsers keep, and how often one let go of it

    def offer(self, token: str) -> str:
        """The code of a new link for the holder of this token."""
        return self._add(self._codes, secrets.token_urlsafe(CODE_BYTES), token, LINK_WAIT_MAX_S, LINKS_MAX)

    def redeem(self, code: str) -> str:
        """Exchange a code, once, for a session; `Unauthenticated` for a used, expired or unknown code."""
        with self._lock:
            token, end = self._codes.pop(digest(code), ("", 0.0))
        if not token or time.monotonic() > end:
            raise Unauthenticated("this link was already used, or has expired", hint="`holdfast open` creates a new one")
        session = SESSION_PREFIX + secrets.token_urlsafe(CODE_BYTES)
        return self._add(self._sessions, session, token, SESSION_MAX_S, SESSIONS_MAX)

    def token_of(self, session: str) -> str:
        """The token behind a session; `Unauthenticated` if the session has ended."""
        with self._lock:
            token, end = self._sessions.get(digest(session), ("", 0.0))
        if not token or time.monotonic() > end:
            raise Unauthenticated("this session has ended", hint="`holdfast open` starts a new one")
        return token

    def kept(self, token: str) -> str:
        """The session id of a browser that keeps this token itself. Signing out ends it for every browser with the token;
        the others, whose token stays in force, sign in again.
        """
        known = digest(token)
        with self._lock:
            return f"{known}.{self._signed_out.get(known, 0)}"

    def end(self, shown: str) -> None:
        """End a session, if there is such a one, or those of browsers that keep this token."""
        known = digest(shown)
        with self._lock:
            if shown.startswith(SESSION_PREFIX):
                self._sessions.pop(known, None)
                return
            self._signed_out[known] = self._signed_out.pop(known, 0) + 1
            while len(self._signed_out) > SIGNED_OUT_MAX:
                self._signed_out.popitem(last=False)

    def in_force(self, known: Collection[str]) -> set[str]:
        """Which of these sessions, by digest or by `kept`, have not ended."""
        now = time.monotonic()
        with self._lock:
            return {one for one in known if self._sessions.get(one, ("", 0.0))[1] > now or self._is_kept(one)}

    def _is_kept(self, session: str) -> bool:
        token, kept, times = session.partition(".")
        return bool(kept) and times == str(self._signed_out.get(token, 0))

    def _add(self, to: OrderedDict[str, tuple[str, float]], text: str, token: str, life_s: float, most: int) -> str:
        with self._lock:
            to[digest(text)] = token, time.monotonic() + life_s
            while len(to) > most:
                del to[_spared(to)]
        return text


def _spared(known: OrderedDict[str, tuple[str, float]]) -> str:
    """The oldest of the token with the most, so that a token evicts only its own."""
    counts = Counter(token for token, _ in known.values())
    most = max(counts.values())
    return next(key for key, (token, _) in known.items() if counts[token] == most)


class Owner:
    """The daemon's own user: an admin, by a token that ends with the process."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.links = Links()
        self._digest = digest(token)

    def is_shown(self, text: str) -> bool:
        """Whether this is the owner's token, in constant time."""
        return hmac.compare_digest(digest(text), self._digest)


def digest(text: str) -> str:
    """The SHA-256 of a secret. 256 random bits need neither salt nor a slow hash."""
    return hashlib.sha256(text.encode()).hexdigest()
