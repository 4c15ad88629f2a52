"""python -m holdfast.demo: the demo with its defaults, in ./demo-output; with --nodes N, the one of several nodes."""

import argparse
from pathlib import Path

from . import main, nodes
from .config import STEPS

parser = argparse.ArgumentParser(prog="holdfast.demo", description=__doc__)
parser.add_argument("--directory", type=Path, default=Path("demo-output"))
parser.add_argument("--steps", type=int)
parser.add_argument("--stop-daemon", action="store_true", help="do not leave the daemon running at the end")
parser.add_argument("--nodes", type=int, default=1, help="so many nodes on one directory, one of which is lost for good")
parser.add_argument("--catalog", help="with --nodes: an empty PostgreSQL database (default: a server of the demo's own)")
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what the one machine trains on")
options = parser.parse_args()
if options.nodes > 1:
    raise SystemExit(nodes.main(options.directory, options.nodes, options.steps or nodes.STEPS, options.catalog))
raise SystemExit(main(options.directory, options.steps or STEPS, not options.stop_daemon, options.device))
