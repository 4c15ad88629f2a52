"""python -m holdfast.demo: the demo with its defaults, in ./demo-output."""

import argparse
from pathlib import Path

from . import main
from .config import STEPS

parser = argparse.ArgumentParser(prog="holdfast.demo", description=__doc__)
parser.add_argument("--directory", type=Path, default=Path("demo-output"))
parser.add_argument("--steps", type=int, default=STEPS)
parser.add_argument("--stop-daemon", action="store_true", help="do not leave the daemon running at the end")
options = parser.parse_args()
raise SystemExit(main(options.directory, options.steps, keep_daemon=not options.stop_daemon))
