"""rich's console for our commands: no markup, and text from elsewhere cannot steer the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.terminal.tables import Table
from holdfast_formats.printable import visible_lines


class SafeConsole(Console):
    """Prints tables as lines with tabs if stdout is no terminal, and escapes control characters."""

    def print(self, *objects: Any, **options: Any) -> None:
        if len(objects) == 1 and isinstance(objects[0], Table) and not self.is_terminal:
            self.file.write(objects[0].plain())
            return
        super().print(*map(_safe, objects), **{"markup": False, "emoji": False, **options})


def _safe(shown: Any) -> Any:
    if isinstance(shown, str):
        return visible_lines(shown)
    if isinstance(shown, Text) and visible_lines(shown.plain) != shown.plain:
        return _safe_text(shown)
    return shown


def _safe_text(text: Text) -> Text:
    made = Text(style=text.style)
    cuts = sorted({end for span in text.spans for end in (span.start, span.end)})
    for piece in text.divide(cuts):
        part = Text(visible_lines(piece.plain))
        for span in piece.spans:
            part.stylize(span.style)
        made.append_text(part)
    return made
