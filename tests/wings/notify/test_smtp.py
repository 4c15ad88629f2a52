"""Receivers that mean harm or have a bad day: no message waits for one without end, or is sent again for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast_service.wings.notify import delivery, smtp
from holdfast_service.wings.notify.delivery import NotDelivered, deliver
from holdfast_service.wings.notify.targets import HttpTarget, MailTarget
from tests.wings.notify.receivers import Mail, Web, endless, serving
from tests.wings.notify.test_delivery import alert, hook, mail, notice


@pytest.mark.parametrize(
    ("begin", "piece"), [(b"HTTP/1.1 200 OK\r\nX: ", b"x"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")], ids=["head", "hints"]
)
def test_a_web_server_that_never_ends_its_answer(begin: bytes, piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its steps is quick: without a limit for the whole, nothing would be told any more, and nobody know of it."""
    monkeypatch.setattr(delivery, "WHOLE_S", 0.5)
    with endless(begin, piece) as server, pytest.raises(NotDelivered, match="no reply in time"):
        deliver(HttpTarget(name="x", kind="webhook", url=server.url), notice(alert()))


@pytest.mark.parametrize(
    ("begin", "piece", "limit", "value"),
    [
        (b"220-", b"x", "WHOLE_S", 0.5),
        (b"220-hello\r\n", b"220-hello\r\n", "WHOLE_S", 0.5),
        (b"", b"220-hello\r\n" * 1000, "ANSWERS_BYTES_MAX", 10_000),
    ],
    ids=["line", "lines", "bytes"],
)
def test_a_mail_server_that_never_ends_its_answer(
    begin: bytes, piece: bytes, limit: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up after a time, and after a number of bytes."""
    monkeypatch.setattr(smtp, limit, value)
    with endless(begin, piece) as server:
        place = server.url.removeprefix("http://")
        to = MailTarget(name="x", kind="mail", server=place, sender="a@b", to=("c@d",), tls="none")
        with pytest.raises(NotDelivered):
            deliver(to, notice(alert()))


@pytest.mark.parametrize("goodbye", ["421 go away", "250 what", ""])
def test_mail_that_was_accepted_stays_so(tmp_path: Path, goodbye: str) -> None:
    """Whatever the server says to the goodbye. It would come again and again."""
    with serving(Mail()) as server:
        server.goodbye = goodbye
        deliver(mail(server, tmp_path), notice(alert()))
        assert len(server.got) == 1


def test_nobody_is_mentioned_in_any_chat() -> None:
    """Mattermost, Discord and Rocket.Chat take `@all` and Markdown in what Slack shows as it is."""
    with serving(Web()) as web:
        said = "@everyone @channel <@U1> [your bank](http://evil.example)"
        deliver(hook(web, kind="slack"), notice(alert(text=said, hint=f"{said}\nerror: another: run")))
        text = json.loads(web.got[0].body)["text"]
    assert "@everyone" not in text and "@channel" not in text and "@U1" not in text and "](" not in text
    assert "\nerror: another" not in text


def test_hints_are_of_one_line(tmp_path: Path) -> None:
    with serving(Mail()) as server:
        deliver(mail(server, tmp_path), notice(alert(hint="look\n\nerror: another: run")))
        assert "\nerror: another" not in server.got[0].get_content().replace("\r", "")
