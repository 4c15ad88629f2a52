"""Parts of pages that are kept: they are another viewer's only where that one may see the same, and text is text."""

from __future__ import annotations

from collections.abc import Callable

from holdfast_formats.rest.measurements import Acknowledgement, Alert
from holdfast_service.wings.console import refreshed_parts
from holdfast_service.wings.console.refreshed_parts import RunColumns
from tests.wings.console.reading import Page
from tests.wings.notify.test_alerts import summary

HOSTILE = '"><script>x</script>'
SEEN = Acknowledgement(by=HOSTILE, at="2030-01-01T00:00:00Z", until=HOSTILE)


def may(*scopes: str) -> Callable[..., bool]:
    return lambda scope, run=None: scope in scopes


def with_metric(name: str) -> RunColumns:
    return RunColumns(state=True, metric=name, crash=True, trend=True)


def test_buttons_are_the_viewers_own() -> None:
    """Whoever looked before."""
    one = Alert(level="error", code="checkpoint-damaged", text="t", hint="h", remedy="repair", step=5, run="r")
    for scopes, labels in (
        (("admin", "write"), ["Repair step 5", "Acknowledge", "Snooze 1 h"]),
        ((), []),
        (("write",), ["Acknowledge", "Snooze 1 h"]),
        (("admin", "write"), ["Repair step 5", "Acknowledge", "Snooze 1 h"]),
    ):
        shown = refreshed_parts.alert(one, "overview", may(*scopes))
        assert [label for label in ("Repair step 5", "Acknowledge", "Snooze 1 h") if f">{label}<" in shown] == labels
    assert refreshed_parts.alert(one, "overview", may()) is refreshed_parts.alert(one, "overview", may())
    assert "<p" not in refreshed_parts.alert(one, "run", may(), hint=False)


def test_what_changes_is_shown() -> None:
    """Each thing that a line says, and a metric by whatever name."""
    lines = {
        refreshed_parts.run_line(summary("r", **changes), with_metric(metric))
        for changes, metric in (
            ({}, ""),
            ({}, "loss"),
            ({"quota_bytes": 90_000}, ""),
            ({"life": "finished"}, ""),
            ({"life": "died"}, ""),
            ({"saves": ()}, ""),
        )
    }
    assert len(lines) == 6


def test_hostile_text_is_text() -> None:
    """Of whatever is named by people."""
    alerts = [
        Alert(level="error", code=HOSTILE, text=HOSTILE, hint=HOSTILE, since=HOSTILE, subject=HOSTILE, acknowledged=SEEN),
        Alert(level="error", code="x", text=HOSTILE, hint="`" + HOSTILE, since=HOSTILE, subject=HOSTILE, run=HOSTILE),
    ]
    made = summary(HOSTILE, life="finished", since=HOSTILE).model_copy(update={"metrics": {HOSTILE: 1e308}})
    parts = [refreshed_parts.alert(one, "overview", may("admin", "write")) for one in alerts]
    parts.append(refreshed_parts.run_line(made, with_metric(HOSTILE)))
    for part in parts:
        assert "<script" not in part and "script" in part
        assert "x</script>" not in part
    assert Page(f"<ul>{parts[0]}{parts[1]}</ul>").text.count(HOSTILE) >= 5
