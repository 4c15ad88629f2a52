"""Masks secrets in command lines and configs before they are remembered: by the name of what they are given to, or by form.

Rather too much than too little: what is masked is shown as `***`, and who wants it remembered gives it another name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
DEPTH_MAX = 32
_SECRET = frozenset(
    [
        "password",
        "passwd",
        "passphrase",
        "pwd",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "apikey",
        "auth",
        "authorization",
        "bearer",
        "cookie",
    ]
)
_KEYS = frozenset(
    [
        "api",
        "access",
        "private",
        "secret",
        "signing",
        "encryption",
        "account",
        "storage",
        "ssh",
        "deploy",
        "wandb",
        "hf",
        "openai",
    ]
)  # … key
_NO_SECRETS = frozenset(
    ["bos", "cls", "decoder", "eos", "image", "mask", "pad", "sep", "special", "start", "stop", "unk"]
)  # … token: of a tokenizer
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_OPTION = re.compile(r"(?P<name>[+~]*-{0,2}[A-Za-z_][\w.@/-]*)=(?P<value>.*)", re.DOTALL)
_FORMS = re.compile(
    r"(?:sk|pk|rk)-[\w-]{16,}|hf_\w{16,}|gh[opsur]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|hft_\w{16,}"
)
_IN_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^/@\s]+)@")
_IN_QUERY = re.compile(r"(?P<name>[?&][\w.-]+)=(?P<value>[^&#\s]+)")
_BEARER = re.compile(r"(?P<scheme>\b(?:bearer|basic)\s+)\S+", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether what is given to an option, or stands under a key, of this name is a secret."""
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2].rpartition("/")[2])]
    if _SECRET.intersection(words):
        return True
    last, before = (words[-1] if words else ""), (words[-2] if len(words) > 1 else "")
    return (last == "token" and before not in _NO_SECRETS) or (last in ("key", "keys") and before in _KEYS)


def masked_text(text: str) -> str:
    """The same without what has the form of a secret: tokens of well-known services, and passwords in addresses."""
    text = _IN_URL.sub(rf"\g<scheme>{MASK}@", _FORMS.sub(MASK, text))
    text = _IN_QUERY.sub(lambda hit: f"{hit['name']}={MASK}" if is_secret(hit["name"]) else hit[0], text)
    return _BEARER.sub(rf"\g<scheme>{MASK}", text)


def masked_command(words: Sequence[str]) -> list[str]:
    """A command line without secrets: `--token X`, `--token=X`, `model.api_key=X`, `-H 'Authorization: Bearer X'`."""
    found: list[str] = []
    hide = False
    for word in words:
        given = _OPTION.fullmatch(word)
        if hide and not (word.startswith("--") and len(word) > 2):
            found.append(MASK)
            hide = False
            continue
        hide = False
        if given and is_secret(given["name"]):
            found.append(f"{given['name']}={MASK}")
            continue
        header, colon, _ = word.partition(":")
        if colon and "//" not in word and re.fullmatch(r"[\w-]+", header) and is_secret(header):
            found.append(f"{header}: {MASK}")
            continue
        hide = word.startswith("-") and not given and is_secret(word)
        found.append(masked_text(word))
    return found


def masked(value: Any, depth: int = 0) -> Any:
    """A JSON value without secrets: by their keys in mappings, by their form in text."""
    if depth > DEPTH_MAX:
        return MASK
    if isinstance(value, Mapping):
        return {
            name: MASK if is_secret(name) and not isinstance(said, bool | None) else masked(said, depth + 1)
            for name, said in value.items()
        }
    if isinstance(value, list):
        return [masked(one, depth + 1) for one in value]
    return masked_text(value) if isinstance(value, str) else value
