"""Messages to real receivers: what they get, that it is signed, and that no failure shows a secret."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats.rest.notifications import Notice, NoticedAlert
from holdfast_service.wings.notify import messages
from holdfast_service.wings.notify.delivery import NotDelivered, deliver, signature
from holdfast_service.wings.notify.targets import HttpTarget, MailTarget
from tests.daemons import free_port
from tests.wings.notify.receivers import CERTIFICATE, PASSWORD, USER, Mail, Web, secret, serving

KEY = "0123456789abcdef-the-key"
HIDDEN = "services/T0/B0/verysecret"


def alert(**more: Any) -> NoticedAlert:
    about = {"id": "1" * 32, "status": "firing", "level": "error", "code": "run-died", "run": "llama", "since": "then"}
    return NoticedAlert.model_validate({**about, "text": "ranks <!channel> disappeared", "hint": "look & see", **more})


def notice(*alerts: NoticedAlert, **more: Any) -> Notice:
    about = {"kind": "alerts", "id": "f" * 32, "at": "2026-01-02T03:04:05.000Z", "target": "ops", "node": "node-1"}
    return Notice.model_validate({**about, "alerts": list(alerts), **more})


def hook(web: Web, path: str = "/hook", **more: Any) -> HttpTarget:
    return HttpTarget(name="ops", kind=more.pop("kind", "webhook"), url=f"{web.url}{path}", **more)


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(Web()) as server:
        yield server


def test_a_webhook_gets_signed_json(web: Web, tmp_path: Path) -> None:
    """By the Standard Webhooks, computed here a second time; each of body, id and time is part of it."""
    deliver(hook(web, secret_file=secret(tmp_path, KEY)), notice(alert()))
    got = web.got[0]
    assert (got.path, json.loads(got.body)) == ("/hook", notice(alert()).model_dump())
    stamp, message_id = got.headers["webhook-timestamp"], got.headers["webhook-id"]
    signed = f"{message_id}.{stamp}.".encode() + got.body
    mac = hmac.new(KEY.encode(), signed, hashlib.sha256).digest()
    assert got.headers["webhook-signature"] == "v1," + base64.b64encode(mac).decode()
    assert message_id == notice().id and got.headers["content-type"] == "application/json"


def test_a_secret_of_the_standard() -> None:
    """The example of the Standard Webhooks' own specification."""
    key = b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    found = signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_without_a_secret_nothing_is_signed(web: Web) -> None:
    deliver(hook(web), notice(alert()))
    assert "webhook-signature" not in web.got[0].headers


def test_slack_gets_text_that_mentions_nobody(web: Web) -> None:
    """Names and texts are no markup."""
    over = alert(status="recovered", run=None, text="a node is lost", url="https://h/")
    deliver(hook(web, kind="slack"), notice(alert(told=2), over, waiting=3))
    text = json.loads(web.got[0].body)["text"]
    assert "<" not in text.replace("&lt;", "") and "&lt;!channel&gt;" in text and "look &amp; see" in text
    assert text.startswith(":red_circle: error: llama: ranks") and ":large_green_circle: over: a node is lost" in text
    assert "sent 2 times before" in text and "3 more follow" in text and "https://h/" in text


@pytest.mark.parametrize("status", [301, 307, 400, 404, 429, 500])
def test_a_refusal_is_told_without_the_answer(web: Web, status: int, caplog: pytest.LogCaptureFixture) -> None:
    """No redirect is followed, nothing of the answer is repeated, and how long to wait is heeded within limits."""
    caplog.set_level(logging.DEBUG, "holdfast_service")
    web.status, web.more = status, {"Location": f"{web.url}/elsewhere", "Retry-After": "99999999"}
    with pytest.raises(NotDelivered) as failed:
        deliver(hook(web, f"/{HIDDEN}"), notice(alert()))
    said = f"{failed.value!r} {failed.value.problem} {failed.value.hint} {caplog.text}"
    assert str(status) in said and "nobody is to read" not in said and "verysecret" not in said
    assert (len(web.got), failed.value.again_s) == (1, 600)


@pytest.mark.parametrize("kind", ["refused", "unknown", "cut"])
def test_who_cannot_be_reached(kind: str, tmp_path: Path) -> None:
    """What the system says is told, and the address is not."""
    urls = {"refused": f"http://127.0.0.1:{free_port()}/{HIDDEN}", "unknown": f"http://no-such-host.invalid/{HIDDEN}"}
    path = secret(tmp_path, urls.get(kind, "no address verysecret"))
    with pytest.raises(NotDelivered) as failed:
        deliver(HttpTarget(name="x", kind="slack", url_file=path), notice(alert()))
    assert "verysecret" not in f"{failed.value!r} {failed.value.hint}" and failed.value.__cause__ is None


def test_https_is_checked() -> None:
    """An unknown certificate is refused by name, and accepted once it is trusted."""
    with serving(Web(tls=True)) as web:
        with pytest.raises(NotDelivered, match="certificate is not trusted"):
            deliver(hook(web), notice(alert()))
        deliver(hook(web, ca_file=CERTIFICATE), notice(alert()))
        assert len(web.got) == 1
        with pytest.raises(NotDelivered, match="cannot read the certificates"):
            deliver(hook(web, ca_file=Path("/nothing")), notice(alert()))


def test_proxies_are_those_of_the_file(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment says about proxies changes nothing; what the file says does."""
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    deliver(hook(web), notice(alert()))
    deliver(HttpTarget(name="x", kind="webhook", url="http://far.invalid/hook", proxy=web.url), notice(alert()))
    assert [got.path for got in web.got] == ["/hook", "http://far.invalid/hook"]


def mail(at: Mail, directory: Path, **more: Any) -> MailTarget:
    about = {"user": USER, "password_file": secret(directory, PASSWORD, "password"), "ca_file": CERTIFICATE}
    to = ("a@example.com", "b@example.com")
    tls = "tls" if at.tls else "starttls"
    given = {"server": at.place, "sender": "holdfast@example.com", "to": to, "tls": tls, **about, **more}
    return MailTarget.model_validate({"name": "mail", "kind": "mail", **given})


@pytest.mark.parametrize("tls", [False, True])
def test_mail_after_a_login_over_tls(tmp_path: Path, tls: bool) -> None:
    """With STARTTLS and with TLS from the beginning; headers are of one line whatever an alert says."""
    with serving(Mail(tls)) as server:
        deliver(mail(server, tmp_path), notice(alert(text="lost\r\nBcc: x@example.com"), alert(run="gpt")))
        got, (sender, to) = server.got[0], server.envelopes[0]
    assert "holdfast@example.com" in sender and [one.partition("<")[2] for one in to] == ["a@example.com>", "b@example.com>"]
    assert got["subject"] == "[holdfast] error: llama: lost Bcc: x@example.com (and 1 more)" and got["bcc"] is None
    assert (got["to"], got["message-id"]) == ("a@example.com, b@example.com", f"<{'f' * 32}@example.com>")
    assert (got["auto-submitted"], got["date"]) == ("auto-generated", "Fri, 02 Jan 2026 03:04:05 +0000")
    text = got.get_content().replace("\r", "")
    assert "error: llama: lost Bcc: x@example.com\nlook & see" in text and "error: gpt" in text


def test_mail_that_fails(tmp_path: Path) -> None:
    """A wrong password, an unknown certificate, nobody there: by name, and without the password."""
    wrong = secret(tmp_path, "verysecret", "wrong")
    with serving(Mail()) as server:
        for more, said in (
            ({"password_file": wrong}, "refused the login"),
            ({"ca_file": None}, "certificate is not trusted"),
            ({"user": None, "password_file": None}, "530"),
            ({"server": f"127.0.0.1:{free_port()}"}, "no connection"),
            ({"password_file": tmp_path / "nothing"}, "cannot read"),
        ):
            with pytest.raises(NotDelivered, match=said) as failed:
                deliver(mail(server, tmp_path, **more), notice(alert()))
            assert "verysecret" not in f"{failed.value!r} {failed.value.hint}"
        assert not server.got
    with serving(Mail()) as server:
        with pytest.raises(NotDelivered, match="does not support it: SMTP AUTH"):
            deliver(mail(server, tmp_path, tls="none"), notice(alert()))
        assert not server.got


def test_a_test_message_says_that_it_is_one() -> None:
    made = notice(kind="test")
    assert messages.subject(made) == "[holdfast] test message of node-1"
    assert "target ops works" in messages.plain(made) and "target ops works" in messages.slack(made)


def test_long_subjects_keep_their_count() -> None:
    line = messages.subject(notice(alert(text="x" * 500), alert()))
    assert len(line) <= messages.SUBJECT_MAX and line.endswith("(and 1 more)")


def test_the_receivers_own_certificate_is_valid() -> None:
    """These tests prove nothing with one that is refused anyway."""
    assert ssl.create_default_context(cafile=CERTIFICATE).get_ca_certs()
