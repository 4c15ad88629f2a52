"""`python -m holdfast_service.offline repair|import|merge|export|convert|catalog|tokens …`: works on a root.

A daemon may serve it or not. `holdfast` calls this program, and prints its output: one JSON document, which is a problem
after an error.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence

from holdfast_formats.errors import RoundAborted, exit_status

ACTS = ("repair", "import", "merge", "export", "convert")  # their programs do several things
NAMES = (*ACTS, "catalog", "tokens")


def main(arguments: Sequence[str]) -> int:
    """Run the program that the first argument names; 2 where it names none."""
    name, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if name not in NAMES:
        print(f"usage: python -m holdfast_service.offline {'|'.join(NAMES)} …", file=sys.stderr)
        return 2
    before = signal.signal(signal.SIGINT, _stopped)
    try:
        return _program(name)([name, *rest] if name in ACTS else rest)
    except KeyboardInterrupt:
        problem = RoundAborted("stopped by a signal", hint="the same command begins again")
        print(json.dumps(problem.problem()))
        return exit_status(problem)
    finally:
        signal.signal(signal.SIGINT, before)


def _stopped(*_: object) -> None:
    """Stop, and ignore later signals during the clean-up: a terminal's Ctrl-C arrives directly and through `holdfast`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _program(name: str) -> Callable[[list[str]], int]:
    """Each imports only what it needs: creating a token does not import a repair."""
    if name == "catalog":
        from holdfast_service.offline import catalog

        return catalog.main
    if name in ("export", "convert"):
        from holdfast_service.offline import export

        return export.main
    if name == "tokens":
        from holdfast_service.offline import tokens

        return tokens.main
    from holdfast_service.offline import repair_import

    return repair_import.main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
