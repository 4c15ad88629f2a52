"""`python -m holdfast_service.offline repair|import|merge|export|catalog|tokens …`: works on a root.

A daemon may serve it or not. `holdfast` calls this program, and prints what it says: one JSON document, a problem where it
ends with an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

NAMES = ("repair", "import", "merge", "export", "catalog", "tokens")


def main(arguments: Sequence[str]) -> int:
    """Run the program that the first argument names; 2 where it names none."""
    name, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if name not in NAMES:
        print(f"usage: python -m holdfast_service.offline {'|'.join(NAMES)} …", file=sys.stderr)
        return 2
    return _program(name)([name, *rest] if name in ("repair", "import", "merge") else rest)


def _program(name: str) -> Callable[[list[str]], int]:
    """Each imports what it needs alone: a token is made without what a repair needs."""
    if name == "catalog":
        from holdfast_service.offline import catalog

        return catalog.main
    if name == "export":
        from holdfast_service.offline import export

        return export.main
    if name == "tokens":
        from holdfast_service.offline import tokens

        return tokens.main
    from holdfast_service.offline import repair_import

    return repair_import.main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
