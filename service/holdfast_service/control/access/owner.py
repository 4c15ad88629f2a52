"""The owner of a daemon: a token of its own, made at the start and kept in memory, and one-time links into a browser.

Only digests are kept of tokens, codes and sessions that are shown; they are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict

from holdfast_formats.errors import Unauthenticated

SESSION_PREFIX = "hs_"
CODE_BYTES = 32
LINK_WAIT_MAX_S = 60.0
SESSION_MAX_S = 7 * 86_400.0
LINKS_MAX = 64
SESSIONS_MAX = 256


class Links:
    """Codes that are good once and for a minute, and the sessions that they become. Thread-safe.

    A session stands for the token with which its link was made, and ends with it, or with the daemon.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def offer(self, token: str) -> str:
        """The code of a new link for whoever has this token."""
        return self._add(self._codes, secrets.token_urlsafe(CODE_BYTES), token, LINK_WAIT_MAX_S, LINKS_MAX)

    def redeem(self, code: str) -> str:
        """A session for a code, which is used up by that; `Unauthenticated` for one that was, is too old, or is none."""
        with self._lock:
            token, end = self._codes.pop(digest(code), ("", 0.0))
        if not token or time.monotonic() > end:
            raise Unauthenticated("this link was used, or is too old", hint="`holdfast open` makes another one")
        session = SESSION_PREFIX + secrets.token_urlsafe(CODE_BYTES)
        return self._add(self._sessions, session, token, SESSION_MAX_S, SESSIONS_MAX)

    def token_of(self, session: str) -> str:
        """The token that a session stands for; `Unauthenticated` when it has ended."""
        with self._lock:
            token, end = self._sessions.get(digest(session), ("", 0.0))
        if not token or time.monotonic() > end:
            raise Unauthenticated("this session has ended", hint="`holdfast open` begins another one")
        return token

    def end(self, session: str) -> None:
        """End a session, if there is such a one."""
        with self._lock:
            self._sessions.pop(digest(session), None)

    def _add(self, to: OrderedDict[str, tuple[str, float]], text: str, token: str, life_s: float, most: int) -> str:
        with self._lock:
            to[digest(text)] = token, time.monotonic() + life_s
            while len(to) > most:
                to.popitem(last=False)
        return text


class Owner:
    """Who started the daemon, and may do everything: by a token that ends with the process."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.links = Links()
        self._digest = digest(token)

    def is_shown(self, text: str) -> bool:
        """Whether this is the owner's token; as long as any other text takes."""
        return hmac.compare_digest(digest(text), self._digest)


def digest(text: str) -> str:
    """The SHA-256 by which a secret is known. Its 256 random bits need no salt, and no slow hash."""
    return hashlib.sha256(text.encode()).hexdigest()
