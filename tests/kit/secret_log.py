"""`python -m tests.kit.secret_log BYTES`: writes so much log, in the daemon's form and at the level debug, of a client of S3
whose requests fail in every way, with the traceback of each, and with keys that are lent again and again.

A process of its own: pytest keeps what is logged in its own.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta

from holdfast_files.objects import client, keys, sending
from holdfast_formats.errors import CheckpointError
from holdfast_service.observe.logs import start_logging
from tests.files.objects.scripted import Said, answer, refused, scripted
from tests.kit.lenders import LENT_SECRET, lending

log = logging.getLogger("tests.secret_log")

ROUND = 3000
RENEWED = 20  # requests of a round that ask for new keys first
ECHO = f"<Error><Code>SignatureDoesNotMatch</Code><Message>{LENT_SECRET} has the Signature=x</Message></Error>".encode()
SAID = (
    refused(503, "SlowDown"), refused(403, "AccessDenied"), refused(400, "ExpiredToken"), refused(500, "InternalError"),
    Said(answer(403, ECHO)), Said(answer(200, b"1", length=3), "close"), Said(b"HTTP/1.1 2", "reset"),
    Said(answer(200, b"<html>")), Said(answer(200, b"1", "ETag: x\r\n")),
)  # fmt: skip


def _log_with_traceback(error: Exception) -> None:
    """As what nothing expects is logged; of our own errors the log has no traceback."""
    try:
        raise RuntimeError("it failed") from error
    except RuntimeError:
        log.exception("unexpected")


def main(size: int) -> None:
    start_logging("debug")
    sending.PAUSE_MAX_S = 0.0
    with scripted(*SAID) as server, lending(timedelta(minutes=5)) as lender:
        os.environ["AWS_ENDPOINT_URL_S3"] = server.url
        while os.fstat(sys.stderr.fileno()).st_size < size:
            server.say(*SAID * (ROUND // 2))
            os.environ["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = f"{lender.url}/task"
            bucket = client.opened("s3://bucket/p").using(retry_s=0.0)
            for library in ("botocore", "urllib3"):  # as a program may set them that looks for a mistake
                logging.getLogger(library).setLevel(logging.DEBUG)
            for turn in range(ROUND):
                keys.RENEW_S = 0.0 if turn < RENEWED else 15.0
                try:
                    if turn % 3 == 0:
                        bucket.read("key")
                    elif turn % 3 == 1:
                        bucket.put("key", b"bytes")
                    else:
                        list(bucket.pages(""))
                except CheckpointError as error:
                    _log_with_traceback(error)
            bucket.close()
            server.requests.clear()
        print(len(lender.lent))


if __name__ == "__main__":
    main(int(sys.argv[1]))
