"""Sends one notice to one target, over HTTP or by mail. Errors and logs contain no secret and no whole address.

No redirect is followed, and only a response's status is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import logging
import smtplib
import time
from email.message import EmailMessage
from email.utils import format_datetime

import httpx

from holdfast_formats import timestamps
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.notifications import Notice
from holdfast_service.wings.notify import messages
from holdfast_service.wings.notify.smtp import conversation
from holdfast_service.wings.notify.targets import HttpTarget, MailTarget, read_secret
from holdfast_service.wings.notify.watched_daemons.tls_connections import cause, trusting, within

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # for each step: connecting, sending, the answer's head;
WHOLE_S = 30.0  # and for all of them
RETRY_AFTER_MAX_S = 600.0
STANDARD_PREFIX = b"whsec_"  # a secret of the Standard Webhooks is base64 behind this


class NotDelivered(Exception):
    """A notice was not accepted. `again_s`: the delay that its target requests."""

    def __init__(self, problem: str, hint: str, again_s: float = 0.0) -> None:
        super().__init__(problem)
        self.problem, self.hint, self.again_s = problem, hint, again_s


def deliver(target: HttpTarget | MailTarget, notice: Notice) -> None:
    """Send a notice; returns when its target has accepted it. Raises `NotDelivered`."""
    try:
        if isinstance(target, HttpTarget):
            _post(target, notice)
        else:
            _mail(target, notice)
    except InvalidRequest as error:  # a secret's file
        raise NotDelivered(error.detail, error.hint or "correct the file given by --notify") from None


def signature(secret: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """The `webhook-signature` of the Standard Webhooks: HMAC-SHA256 over id, time and body."""
    if secret.startswith(STANDARD_PREFIX):
        try:
            key = base64.b64decode(secret.removeprefix(STANDARD_PREFIX), validate=True)
        except binascii.Error:
            raise InvalidRequest("the secret begins with whsec_, but the rest is not base64") from None
    else:
        key = secret
    signed = b".".join([message_id.encode(), str(timestamp).encode(), body])
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def _post(target: HttpTarget, notice: Notice) -> None:
    if target.kind == "slack":
        body = json.dumps({"text": messages.slack(notice)}).encode()
    else:
        body = notice.model_dump_json().encode()
    headers = {"Content-Type": "application/json", "User-Agent": "holdfast"}
    if target.kind == "webhook":
        now = int(time.time())
        headers |= {"webhook-id": notice.id, "webhook-timestamp": str(now)}
        if target.secret_file is not None:
            headers["webhook-signature"] = signature(read_secret(target.secret_file), notice.id, now, body)
    address, trust = target.address(), trusting(target.ca_file)

    async def posted() -> tuple[int, str]:
        async with (
            httpx.AsyncClient(
                verify=trust, proxy=target.proxy, timeout=TIMEOUT_S, trust_env=False, follow_redirects=False
            ) as client,
            client.stream("POST", address, content=body, headers=headers) as answer,
        ):
            return answer.status_code, answer.headers.get("retry-after", "")

    try:
        status, again = within(WHOLE_S, posted())
    except (httpx.TimeoutException, TimeoutError):
        raise NotDelivered("no reply in time", "check that this machine can reach it") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise NotDelivered(
            f"no connection: {cause(error)}", "check its address, network and certificates from this machine"
        ) from None
    if not 200 <= status < 300:
        raise NotDelivered(f"it replied with status {status}", _advice(status), _seconds(again))


def _mail(target: MailTarget, notice: Notice) -> None:
    host, port = target.place
    trust = trusting(target.ca_file)
    try:
        with conversation(host, port, trust if target.tls == "tls" else None) as server:
            if target.tls == "starttls":
                server.starttls(context=trust)
            if target.user is not None and target.password_file is not None:
                password = read_secret(target.password_file, 1)
                server.login(target.user, password.decode())
            refused = server.send_message(_message(target, notice), target.sender, list(target.to))
    except smtplib.SMTPAuthenticationError as error:
        raise NotDelivered(f"the server refused the login ({error.smtp_code})", "check user and password_file") from None
    except smtplib.SMTPResponseException as error:
        raise NotDelivered(f"the server answered {error.smtp_code}", "see the mail server's log") from None
    except smtplib.SMTPNotSupportedError as error:  # STARTTLS or a login
        raise NotDelivered(f"the server does not support it: {error}", "check server, tls and user") from None
    except smtplib.SMTPException as error:
        raise NotDelivered(f"the server rejected it: {type(error).__name__}", "see the mail server's log") from None
    except (OSError, UnicodeError) as error:
        raise NotDelivered(f"no connection: {cause(error)}", "check server, tls and certificates") from None
    if refused:  # the others have got it, and would get it once more
        log.warning("%d of %d recipients of target %s were rejected", len(refused), len(target.to), target.name)


def _message(target: MailTarget, notice: Notice) -> EmailMessage:
    email_message = EmailMessage()
    email_message["Subject"] = messages.subject(notice)
    email_message["From"], email_message["To"] = target.sender, ", ".join(target.to)
    email_message["Date"] = format_datetime(timestamps.read(notice.at))
    email_message["Message-ID"] = f"<{notice.id}@{target.sender.rpartition('@')[2]}>"
    email_message["Auto-Submitted"] = "auto-generated"
    email_message.set_content(messages.plain(notice))
    return email_message


def _advice(status: int) -> str:
    if 300 <= status < 400:
        return "redirects are not followed: configure the address that it redirects to"
    if status in (401, 403, 404, 410):
        return "check the secret, and whether the address was revoked"
    if status == 413:
        return "the message is too long for it"
    return "see the receiver's log; sending is retried"


def _seconds(again: str) -> float:
    return min(float(again), RETRY_AFTER_MAX_S) if again.isascii() and again.isdigit() and len(again) < 9 else 0.0
