"""`holdfast_service.offline` with small files, to which something happens at a chosen act: `… LOG [CALLER]`."""

from __future__ import annotations

import sys

from holdfast_service.offline.__main__ import end_with, main
from tests.crash.acts import Acts, small_files

if __name__ == "__main__":
    end_with(sys.argv[2:])
    acts = Acts(sys.argv[1], ("MainThread", "holdfast-stream_0"))
    acts.install()
    small_files()
    acts.begin()
    sys.exit(main(sys.stdin.read()))
