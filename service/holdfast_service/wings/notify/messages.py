"""Messages for people: the text of a notice, for Slack and for mail."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_formats.rest.notifications import Notice, NoticedAlert

SUBJECT_MAX = 150  # characters
SLACK_MAX = 30_000  # characters; Slack cuts longer texts off at 40 000
_NOTHING = "\u200b"  # a space of no width
_MARKS = {"error": ":red_circle:", "warning": ":large_yellow_circle:", "recovered": ":large_green_circle:"}


def subject(notice: Notice) -> str:
    """One line: the most important alert, and the number of others."""
    if notice.kind == "test":
        return f"[holdfast] test message of {notice.node}"
    first, *others = notice.alerts
    line = f"[holdfast] {_state(first)}: {_what(first)}"
    more = f" (and {len(others) + notice.waiting} more)" if others or notice.waiting else ""
    return line[: SUBJECT_MAX - len(more)] + more


def plain(notice: Notice) -> str:
    return "\n\n".join(["\n".join(_paragraph(one)) for one in notice.alerts] + list(_ending(notice))) + "\n"


def slack(notice: Notice) -> str:
    """The text of a Slack message. Names and texts are escaped: no markup, no mentions."""
    parts = []
    for one in notice.alerts:
        mark = _MARKS["recovered" if one.status == "recovered" else one.level]
        head, *rest = (_escaped(line) for line in _paragraph(one))
        parts.append("\n".join([f"{mark} {head}", *(f"> {line}" for line in rest)]))
    text = "\n".join([*parts, *(_escaped(line) for line in _ending(notice))])
    return text if len(text) <= SLACK_MAX else text[:SLACK_MAX] + " …"


def _paragraph(one: NoticedAlert) -> Iterator[str]:
    yield f"{_state(one)}: {_what(one)}"
    if one.status == "recovered":
        yield f"It began at {one.since}."
    else:
        yield _line(one.hint)
        if one.told:
            yield f"Firing since {one.since}; sent {one.told} {'time' if one.told == 1 else 'times'} before."
    if one.url is not None:
        yield one.url


def _ending(notice: Notice) -> Iterator[str]:
    if notice.kind == "test":
        yield f"A test message of the Holdfast daemon {notice.node}: target {notice.target} works."
    if notice.waiting:
        yield f"{notice.waiting} more follow in the next message."


def _state(one: NoticedAlert) -> str:
    return "over" if one.status == "recovered" else one.level


def _what(one: NoticedAlert) -> str:
    return f"{one.run}: {_line(one.text)}" if one.run else _line(one.text)


def _line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """Slack has its own markup; compatible receivers also parse Markdown, and mentions such as `@all`."""
    text = text.replace("@", f"@{_NOTHING}").replace("](", f"]{_NOTHING}(")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
