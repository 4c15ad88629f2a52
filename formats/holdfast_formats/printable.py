"""Escapes terminal control characters and invisible characters in untrusted text."""

from __future__ import annotations

import re

# C0 and C1 controls, soft hyphens, marks that are invisible or turn the direction of text, halves of surrogate pairs, tags.
_UNSEEN = (
    "\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f"
)
_IN_A_CELL = re.compile(f"[{_UNSEEN}]")
_IN_LINES = re.compile(f"(?!\n)[{_UNSEEN}]")
_FORMULA = ("=", "+", "-", "@", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # some as wide as 字


def visible(text: str) -> str:
    """On one line: a line feed becomes `\\n`, ESC `\\x1b`, a right-to-left override `\\u202e`."""
    return _IN_A_CELL.sub(_escaped, text)


def visible_lines(text: str) -> str:
    """The same, with the line feeds as they are."""
    return _IN_LINES.sub(_escaped, text)


def spreadsheet_cell(text: str) -> str:
    """A cell of CSV. A would-be formula gets an apostrophe, which makes it text in spreadsheets."""
    shown = visible_lines(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def visible_json(text: str) -> str:
    """A JSON document in whose strings such characters are escaped as in JSON."""
    return _IN_LINES.sub(_json_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _json_escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + ((code - 0x10000) >> 10):04x}\\u{0xDC00 + ((code - 0x10000) & 0x3FF):04x}"
