"""Secrets in command lines and configs are masked; what only looks like one by half of its name is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.link.secrets import MASK, is_secret, masked, masked_command, masked_text

TOKEN = "s3cr3t-Of-Mine"
SECRET_NAMES = ["--token", "--hf-token", "--hf_token", "--password", "--api-key", "--apiKey", "--wandb_api_key", "-password"]
OPEN_NAMES = ["--max-tokens", "--tokenizer", "--pad_token", "--key-dim", "--num-key-value-heads", "--lr", "--sort-key"]


@pytest.mark.parametrize("name", SECRET_NAMES)
@pytest.mark.parametrize("form", ["{0} {1}", "{0}={1}", "+model.{0}={1}"])
def test_a_secret_is_never_in_the_command(name: str, form: str) -> None:
    """As an option and its value, in one word, and in Hydra's form."""
    stripped = name.lstrip("-") if form.startswith("+") else name
    words = ["python", "train.py", *form.format(stripped, TOKEN).split(), "--lr", "3"]
    shown = masked_command(words)
    assert TOKEN not in " ".join(shown) and MASK in " ".join(shown)
    assert shown[:2] == words[:2] and shown[-2:] == words[-2:]


@pytest.mark.parametrize("name", OPEN_NAMES)
def test_other_options_are_shown(name: str) -> None:
    words = ["train.py", name, "7", f"{name}=7"]
    assert masked_command(words) == words


@pytest.mark.parametrize(
    "text",
    [
        "hf_abcdefghijklmnopqrstuv",
        "hf_ZAxr-Lyo3FDS5c6LHr788F4wpct01-IQpkogoa_Op-uBp3",  # one of a daemon's own
        "sk-proj-abcdefghijklmnopqrst",
        "ghp_abcdefghijklmnopqrstuv123",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.c2lnbmF0dXJl",
    ],
)
def test_tokens_are_known_by_their_form(text: str) -> None:
    """Wherever they stand."""
    assert masked_text(f"x={text},y") == f"x={MASK},y"
    assert text not in str(masked_command(["train.py", text])) + str(masked({"note": [text]}))


def test_passwords_in_addresses_and_headers() -> None:
    """Of users, in queries, and in what curl is given."""
    assert masked_text("postgresql://me:pw@host/db") == f"postgresql://{MASK}@host/db"
    assert masked_text("https://host/x?token=1&a=2") == f"https://host/x?token={MASK}&a=2"
    assert TOKEN not in str(masked_command(["-H", f"Authorization: Bearer {TOKEN}"]))
    assert masked_command(["s3://bucket/key", "a:b"]) == ["s3://bucket/key", "a:b"]


@pytest.mark.parametrize(
    "words",
    [
        ["--config", f'{{"a": {{"api_key": "{TOKEN}"}}}}'],
        [f'--config={{"token":"{TOKEN}"}}'],
        ["--kw", f"{{api_key: {TOKEN}, x: 1}}"],
        ["--kw", f"dict(api_key='{TOKEN}')"],
        ["bash", "-c", f"HF_TOKEN={TOKEN} python train.py"],
        ["-c", f"os.environ['HF_TOKEN'] = '{TOKEN}'"],
        ["--env", f"WANDB_API_KEY={TOKEN}"],
        [f"-eWANDB_API_KEY={TOKEN}"],
        ["--dsn", f"host=db password={TOKEN} user=x"],
        ["--connection", f"Server=x;Password={TOKEN};"],
        ["--db", f"postgres://me:p@{TOKEN}@host/db"],
        ["--url", f"https://host/x?a=1&X-Amz-Signature={TOKEN}"],
        ["--hook", f"https://hooks.slack.com/services/T000/B000/{TOKEN}"],
        ["--db-pass", TOKEN],
        [f"--pass={TOKEN}"],
        ["--hftoken", TOKEN],
        ["--jwt", TOKEN],
    ],
)
def test_a_secret_within_a_word_is_masked(words: list[str]) -> None:
    """JSON, YAML, Python, shell, connection strings, signed addresses; in the text of a config too."""
    assert TOKEN not in str(masked_command(["train.py", *words]))
    assert TOKEN not in str(masked({"said": " ".join(words)})) or words[0] in ("--db-pass", "--hftoken", "--jwt")


@pytest.mark.parametrize(
    "words",
    [
        ["--tokens", "8B"],
        ["--data", "/x:/y"],
        ["dp=2,tp=4"],
        ["s3://a/b@v1"],
        ["tokens: 8B, keys: 3"],
        ["--forward-pass", "2"],
    ],
)
def test_what_is_no_secret_is_shown(words: list[str]) -> None:
    assert masked_command(words) == words


@pytest.mark.parametrize("text", ["x", "eyJ", "bearer ", "?", "a=", '"a":"', "a='", "://", "sk-", "A", "password="])
def test_a_long_text_takes_no_longer_than_its_length_says(text: str) -> None:
    """A quarter of a megabyte, which is no more than a weight matrix in a config: minutes, where it is looked at anew from
    each of its characters.
    """
    masked_text(text * (2**18 // len(text)))


def test_lists_of_variables() -> None:
    assert masked([{"name": "HF_TOKEN", "value": TOKEN}]) == [{"name": "HF_TOKEN", "value": MASK}]


def test_an_option_after_a_secret_is_no_value() -> None:
    """`--auth` may be a flag."""
    assert masked_command(["--auth", "--lr", "3"]) == ["--auth", "--lr", "3"]


def test_configs_are_masked_by_their_keys() -> None:
    """At any depth; whether something is on is no secret."""
    config = {"wandb": {"api_key": TOKEN, "use_auth": True}, "tokens": 5, "list": [{"password": TOKEN}], "secret": None}
    shown = masked(config)
    assert TOKEN not in str(shown)
    assert shown["wandb"]["use_auth"] is True and shown["tokens"] == 5 and shown["secret"] is None


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=20,
)


@given(_values)
def test_what_is_masked_keeps_its_shape(value: object) -> None:
    """Keys and lengths; and masked twice is masked once."""
    shown = masked(value)
    assert masked(shown) == shown
    if isinstance(value, dict):
        assert list(shown) == list(value)


def test_names_by_their_words() -> None:
    assert is_secret("optim.api_key") and is_secret("clientSecret") and is_secret("SECRET_KEY")
    assert not is_secret("author") and not is_secret("authors") and not is_secret("monkey") and not is_secret("")


def test_what_stands_below_or_behind_a_secret_name() -> None:
    """In flattened configs, in arguments that a config holds, and keys that begin with dashes."""
    pem = "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----"
    assert masked({"my.secret.value": "s", "auth.db": ["s"], "optim.lr": 1}) == {
        "my.secret.value": MASK,
        "auth.db": MASK,
        "optim.lr": 1,
    }
    assert masked({"argv": ["t.py", "--token", "s", "--lr", "1"]}) == {"argv": ["t.py", "--token", MASK, "--lr", "1"]}
    assert masked({"layers": ["q_proj", "v_proj"], "mixed": ["a", 1]}) == {"layers": ["q_proj", "v_proj"], "mixed": ["a", 1]}
    assert masked_command(["t.py", "--private-key", pem, "--note", pem]) == ["t.py", "--private-key", MASK, "--note", MASK]
    assert masked_text(f"a {pem} b") == f"a {MASK} b"
