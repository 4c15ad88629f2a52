"""`holdfast demo`: a trainer is killed and resumes exactly."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import typer

from holdfast.terminal import console
from holdfast_formats.errors import InvalidRequest

_NEEDED = ("torch", "transformers", "safetensors", "fastapi", "uvicorn")
Directory = Annotated[Path, typer.Option("--directory", metavar="DIR", help="Where everything is kept.")]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="How many steps to train.")]
KeepDaemon = Annotated[bool, typer.Option("--keep-daemon/--stop-daemon", help="Leave the daemon running to look at.")]
Nodes = Annotated[
    int, typer.Option("--nodes", metavar="N", min=1, help="With several nodes, one of which is lost for good.")
]
Device = Annotated[
    Literal["cpu", "cuda"], typer.Option("--device", help="What it trains on; with cuda, up to two devices, one a rank.")
]
Database = Annotated[
    str | None, typer.Option("--catalog", metavar="URL", help="With --nodes: an empty PostgreSQL database, if not its own.")
]


def demo(
    directory: Directory = Path("demo-output"),
    steps: Steps = None,
    keep_daemon: KeepDaemon = True,
    nodes: Nodes = 1,
    catalog: Database = None,
    device: Device = "cpu",
) -> None:
    """Train a small Llama on two ranks, kill it, resume it, and compare it with a run that was left alone.

    Takes one to two minutes on two cores, and says after its first steps how long it will be on this machine. With
    --nodes 3, three daemons with a PostgreSQL of their own train it, one of them is lost, and the others go on.
    """
    with console.reporting(as_json=False):
        if nodes > 1 and device != "cpu":
            raise InvalidRequest("with --nodes the demo trains on processors", hint="leave --nodes or --device out")
        needed = _NEEDED if nodes == 1 else (*_NEEDED, "psycopg")
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            extra = "demo" if nodes == 1 else "demo,postgres"
            raise InvalidRequest(f"the demo needs {', '.join(missing)}", hint=f"pip install 'holdfast-checkpoint[{extra}]'")
        from holdfast.demo import main
        from holdfast.demo import nodes as of_nodes
        from holdfast.demo.config import STEPS

        if nodes > 1:
            raise typer.Exit(of_nodes.main(directory, nodes, steps or of_nodes.STEPS, catalog))
        raise typer.Exit(main(directory, steps or STEPS, keep_daemon, device))
