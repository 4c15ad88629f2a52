"""A server that lends keys of S3 as clouds do: the metadata of an instance (IMDSv2), and the endpoint of a container or pod.

Each time it is asked it lends other keys. `TOKEN` is what a pod must show, and `SESSION` what an instance gets first.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN, SESSION, LENT_SECRET = "token-of-the-pod", "session-of-imds", "lent-secret-of-tests"
ROLES = "/latest/meta-data/iam/security-credentials/"


class Lender:
    """Lends keys that end in `lasting`; `lent` are those so far."""

    def __init__(self, lasting: timedelta) -> None:
        self.lent: list[str] = []
        self.lasting = lasting
        self.away = False  # then it answers 500
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _answering(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def lend(self) -> bytes:
        self.lent.append(f"LENT{len(self.lent) + 1}")
        end = datetime.now(timezone.utc) + self.lasting
        return json.dumps(
            {
                "AccessKeyId": self.lent[-1],
                "SecretAccessKey": LENT_SECRET,
                "Token": f"token-{self.lent[-1]}",
                "Expiration": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "Code": "Success",
            }
        ).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answering(lender: Lender) -> type[BaseHTTPRequestHandler]:
    class Answering(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            known = self.path == "/latest/api/token" and "x-aws-ec2-metadata-token-ttl-seconds" in self.headers
            self._answer(200 if known else 403, SESSION.encode() if known else b"")

        def do_GET(self) -> None:
            if lender.away:
                self._answer(500, b"away")
            elif self.path.startswith(ROLES) and self.headers.get("x-aws-ec2-metadata-token") != SESSION:
                self._answer(401, b"")
            elif self.path == ROLES:
                self._answer(200, b"role")
            elif self.path in (f"{ROLES}role", "/task") or self._is_of_pod():
                self._answer(200, lender.lend())
            else:
                self._answer(401, b"")

        def _is_of_pod(self) -> bool:
            return self.path == "/pod" and self.headers.get("Authorization") == TOKEN

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Tests print nothing."""

    return Answering


@contextmanager
def lending(lasting: timedelta = timedelta(hours=1)) -> Iterator[Lender]:
    """A lender for the length of a block."""
    lender = Lender(lasting)
    try:
        yield lender
    finally:
        lender.close()
