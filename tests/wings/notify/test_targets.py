"""The file of `--notify`: what it may say, and that nothing else is taken, and no secret shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_service.wings.notify.targets import HttpTarget, MailTarget, read_secret, read_targets
from tests.wings.notify.receivers import secret

SECRET_PATH = "T00/B00/verysecret"
WHOLE = f"""
dashboard = "https://holdfast.example.com/"
[[target]]
name = "ops"
kind = "webhook"
url = "https://example.com:8443/hook/abc?key=verysecret"
secret_file = "/etc/holdfast/ops.secret"
runs = "llama-*"
level = "error"
[[target]]
name = "chat"
kind = "slack"
url = "https://hooks.slack.com/services/{SECRET_PATH}"
repeat_s = 0
[[target]]
name = "mail"
kind = "mail"
server = "smtp.example.com"
sender = "holdfast@example.com"
to = ["a@example.com", "b@example.com"]
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "notify.toml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    """Defaults are what the documents say, and what is shown has host and port alone."""
    found = read_targets(write(tmp_path, WHOLE))
    ops, chat, mail = found.target
    assert found.dashboard == "https://holdfast.example.com"
    assert (ops.runs, ops.level, ops.repeat_s, ops.after_s, ops.recovery) == ("llama-*", "error", 14400, 30, True)
    assert (chat.runs, chat.level, chat.repeat_s) == ("*", "warning", 0)
    assert [one.shown for one in found.target] == [
        "https://example.com:8443/…",
        "https://hooks.slack.com/…",
        "a@example.com, b@example.com by smtp.example.com:587",
    ]
    assert isinstance(mail, MailTarget) and mail.tls == "starttls"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('kind = "slack"', "target.1"),
        ("url = 3", "url"),
        ('colour = "red"', "colour"),
        ('name = "a b"', "name"),
        ('url = "file:///etc/passwd"', "http"),
        ('url = "http://user:verysecret@example.com/"', "user"),
        ('url = "http://example.com/\\r\\nX: y"', "http"),
        ('url = "https://example.com:verysecret/"', "port"),
        ('url = "https://[verysecret/"', "host"),
        ('url_file = "/x"', "one of url and url_file"),
        ('runs = "a*b"', "runs"),
        ('level = "info"', "level"),
        ("repeat_s = -1", "repeat_s"),
        ('proxy = "socks5://example.com"', "http"),
        ('secret = "inline"', "secret"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, change: str, said: str) -> None:
    """One line that is wrong; what may be secret is not in the message."""
    lines = {"name": 'name = "x"', "kind": 'kind = "webhook"', "url": 'url = "https://example.com/verysecret"'}
    lines[change.split(" ")[0]] = change
    if change == 'kind = "slack"':
        lines["secret_file"] = 'secret_file = "/x"'
    path = write(
        tmp_path, '[[target]]\nname = "first"\nkind = "webhook"\nurl = "http://a/"\n[[target]]\n' + "\n".join(lines.values())
    )
    with pytest.raises(InvalidRequest) as refused:
        read_targets(path)
    assert said in refused.value.detail and "verysecret" not in refused.value.detail


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[target", "not TOML"),
        ("\xff", "not"),
        ("[target]\nname = 'x'", "target"),
        (WHOLE.replace('"chat"', '"ops"'), "two targets"),
        (WHOLE.replace('"b@example.com"', '"b@example.com\\nBcc: c@example.com"'), "to"),
        (WHOLE.replace('server = "smtp.example.com"', 'server = "smtp.example.com:x"'), "server"),
        (WHOLE + 'user = "u"\n', "password_file"),
        (WHOLE + 'user = "u"\npassword_file = "/x"\ntls = "none"\n', "clear text"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "notify.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequest, match=r"--notify") as refused:
        read_targets(path)
    assert said in refused.value.detail and SECRET_PATH not in refused.value.detail


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InvalidRequest, match="cannot read"):
            read_targets(path)


@pytest.mark.parametrize(
    ("server", "place"),
    [
        ("mail", ("mail", 587)),
        ("mail:2525", ("mail", 2525)),
        ("[::1]:25", ("::1", 25)),
        ("[::1]", ("::1", 587)),
        ("::1", ("::1", 587)),
    ],
)
def test_the_place_of_a_mail_server(server: str, place: tuple[str, int]) -> None:
    made = MailTarget(name="m", kind="mail", server=server, sender="a@b", to=("c@d",))
    assert made.place == place


def test_the_documents_example_and_table(tmp_path: Path) -> None:
    """The example is a valid file, and the table has exactly the keys that there are."""
    text = (Path(__file__).parents[3] / "docs" / "telling.md").read_text()
    example = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]
    assert [one.kind for one in read_targets(write(tmp_path, example)).target] == ["slack", "webhook", "mail"]
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \|", text.partition("| key | kinds of targets |")[2].partition("\n\n")[0], re.MULTILINE
    )
    documented = {name for row in rows for name in re.findall(r"\w+", row)}
    assert documented == {*HttpTarget.model_fields, *MailTarget.model_fields}


def test_secrets_are_in_files_that_not_everybody_reads(tmp_path: Path) -> None:
    """White space around is none of it; too short a secret protects nothing."""
    assert read_secret(secret(tmp_path, " 0123456789abcdef ")) == b"0123456789abcdef"
    with pytest.raises(InvalidRequest, match="16 to 4096 bytes"):
        read_secret(secret(tmp_path, "short", "short"))
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_secret(tmp_path / "nothing")
    with pytest.raises(InvalidRequest, match="is not a file"):
        read_secret(Path("/dev/zero"))
    everybody = secret(tmp_path, "0123456789abcdef", "everybody")
    everybody.chmod(0o644)
    with pytest.raises(InvalidRequest, match="every user can read"):
        read_secret(everybody)
