"""A training script in the ranks that `paddle.distributed.launch` starts: `launched.py MODULE ARGUMENT…`.

The launcher gives each rank a session of its own. They end with it, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

from tests.integrations.recording import RECORD

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ[RECORD] = os.environ[RECORD].format(os.environ["PADDLE_TRAINER_ID"])
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
