"""Masks secrets in command lines and configs before they are stored: by option or key name, or by their form.

It masks too much rather than too little, as `***`. To keep such a value, give it another name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
DEPTH_MAX = 24  # a daemon takes no message that is nested deeper than 32
_SECRET = frozenset(
    [
        "password",
        "passwords",
        "passwd",
        "passphrase",
        "passcode",
        "pwd",
        "pw",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "cred",
        "creds",
        "apikey",
        "apikeys",
        "auth",
        "authorization",
        "bearer",
        "cookie",
        "cookies",
        "jwt",
        "accesskey",
        "authkey",
        "secretkey",
        "privatekey",
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
        "license",
        "shared",
        "service",
    ]
)  # … key
_NO_SECRETS = frozenset(
    ["bos", "cls", "decoder", "eos", "image", "mask", "pad", "sep", "special", "start", "stop", "unk"]
)  # … token: of a tokenizer
_OF_WHOM = frozenset(
    ["db", "database", "user", "smtp", "mysql", "pg", "postgres", "redis", "admin", "root", "login", "proxy", "http", "ftp"]
)  # … pass
_IN_ONE_WORD = ("hftoken", "authtoken", "accesstoken", "apitoken", "bearertoken", "usertoken")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_OPTION = re.compile(r"(?P<name>[+~]*-{0,2}[A-Za-z_][\w.@/-]*)=(?P<value>.*)", re.DOTALL)
_FORMS = re.compile(
    r"(?:sk|pk|rk)-[\w-]{16,}|hf_[\w-]{16,}|gh[opsur]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]+|(?<=/api/webhooks/)[\w/-]+",
    re.DOTALL,
)
_IN_URL = re.compile(r"(?P<scheme>[A-Za-z0-9+.-]{0,31}://)(?P<user>[^/\s?#]+)@")
_IN_QUERY = re.compile(r"(?P<name>[?&][\w.-]{1,128})=(?P<value>[^&#\s]+)")
_IN_QUERIES = frozenset(["sig", "signature"])  # of addresses that are signed
_BEARER = re.compile(r"(?P<scheme>\b(?:bearer|basic)\s{1,9})\S+", re.IGNORECASE)
# What is given to a name within a text: JSON, YAML, Python, a connection string, a shell's assignment.
_GIVEN = re.compile(
    r"(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]{0,127})(?P<between>(?:\\?[\"'])?\]?\s{0,3}[:=]\s{0,3}(?!//))"
    r"(?P<value>\\?\"[^\"]*\"?|'[^']*'?|(?:bearer|basic|token)\s+[^\s,;&}\])\"']+|[^\s,;&}\])\"']+)",
    re.IGNORECASE,
)
_SAID = re.compile(r"true|false|none|null|\*\*\*", re.IGNORECASE)  # whether something is on is no secret


def is_secret(name: str) -> bool:
    """Whether an option or key of this name holds a secret."""
    around, _, own = name.rpartition(".")
    words = [word.lower() for word in _WORD.findall(own.rpartition("/")[2])]
    if _SECRET.intersection(words) or _SECRET.intersection(word.lower() for word in _WORD.findall(around)):
        return True  # values below such a key are secret, too
    last, before = (words[-1] if words else ""), (words[-2] if len(words) > 1 else "")
    if last.endswith(_IN_ONE_WORD) or (last == "pass" and (before in _OF_WHOM or len(words) == 1)):
        return True
    return (last == "token" and before not in _NO_SECRETS) or (last in ("key", "keys") and before in _KEYS)


def masked_text(text: str) -> str:
    """The text without tokens of well-known services, and without passwords in URLs."""
    text = _IN_URL.sub(rf"\g<scheme>{MASK}@", _FORMS.sub(MASK, text))
    text = _IN_QUERY.sub(lambda hit: f"{hit['name']}={MASK}" if _signs(hit["name"]) else hit[0], text)
    return _GIVEN.sub(_hidden, _BEARER.sub(rf"\g<scheme>{MASK}", text))


def _signs(name: str) -> bool:
    return is_secret(name) or name[1:].lower().rpartition("-")[2] in _IN_QUERIES


def _hidden(hit: re.Match[str]) -> str:
    value = hit["value"]
    quote = next((mark for mark in ('\\"', '"', "'") if value.startswith(mark)), "")
    if not is_secret(hit["name"]) or _SAID.fullmatch(value):
        return hit[0]
    return f"{hit['name']}{hit['between']}{quote}{MASK}{quote}"


def masked_command(words: Sequence[str]) -> list[str]:
    found: list[str] = []
    hide = False
    for word in words:
        given = _OPTION.fullmatch(word)
        if hide and not (word.startswith("--") and len(word) > 2 and not word.startswith("-----")):
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
    if depth > DEPTH_MAX:
        return MASK
    if isinstance(value, Mapping):
        named = next((value_inside for name in ("name", "key") if isinstance(value_inside := value.get(name), str)), "")
        if "value" in value and is_secret(named):  # as lists of variables say it
            value = {**value, "value": MASK}
        return {
            name: MASK if is_secret(name) and not isinstance(value_inside, bool | None) else masked(value_inside, depth + 1)
            for name, value_inside in value.items()
        }
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return masked_command(value)  # as command line arguments, if they are any
    if isinstance(value, list):
        return [masked(one, depth + 1) for one in value]
    return masked_text(value) if isinstance(value, str) else value
