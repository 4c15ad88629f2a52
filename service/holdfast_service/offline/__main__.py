"""`python -m holdfast_service.offline`: work on a root or a directory, which a daemon may serve or not.

`holdfast` calls this program. Its standard input is one document of `holdfast_formats.rest.offline`. It prints one JSON
document: the result, or a problem after an error, whose branch the exit status follows. Its argument, if there is one, is
the process that waits for the result: if that is killed, this program is, too, as if the command were one process.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any

from holdfast_formats.errors import CheckpointError, RoundAborted, exit_status
from holdfast_formats.rest.offline import CatalogWork, OfflineWork, TokenWork, parse

PR_SET_PDEATHSIG = 1


def end_with(caller: Sequence[str]) -> None:
    """Have the kernel kill this process when its parent ends; exit if the caller, a process ID, has ended before.

    Without a caller: nothing. Where the kernel or a sandbox has no descriptors of processes, an earlier end is not seen.
    """
    if not caller:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        watched = os.pidfd_open(int(caller[0]))
    except ProcessLookupError:
        sys.exit("the caller has ended")
    except OSError:
        return
    ended = select.select([watched], [], [], 0)[0]
    os.close(watched)
    if ended:
        sys.exit("the caller has ended")


def main(text: str) -> int:
    """Run it and print the result."""
    before = signal.signal(signal.SIGINT, _stopped)
    try:
        print(json.dumps(_done(parse(text))))
    except KeyboardInterrupt:
        return _refused(RoundAborted("stopped by a signal", hint="run the same command again"))
    except CheckpointError as error:
        return _refused(error)
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


def _refused(error: CheckpointError) -> int:
    print(json.dumps(error.problem()))
    return exit_status(error)


def _stopped(*_: object) -> None:
    """Stop, and ignore later signals during the clean-up: a terminal's Ctrl-C arrives directly and through `holdfast`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _done(work: OfflineWork) -> dict[str, Any]:
    """Each imports only what it needs: creating a token does not import a repair."""
    if isinstance(work, CatalogWork):
        from holdfast_service.offline import catalog

        return catalog.run(work)
    if isinstance(work, TokenWork):
        from holdfast_service.offline import tokens

        return tokens.run(work)
    from holdfast_service.offline import jobs

    return jobs.run(work)


if __name__ == "__main__":
    end_with(sys.argv[1:])
    sys.exit(main(sys.stdin.read()))
