"""`holdfast demo`: a trainer is killed and goes on as if nothing had happened."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from holdfast.terminal import console
from holdfast_formats.errors import InvalidRequest

_NEEDED = ("torch", "transformers", "safetensors", "fastapi", "uvicorn")
Directory = Annotated[Path, typer.Option("--directory", metavar="DIR", help="Where everything is kept.")]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="How many steps to train.")]
KeepDaemon = Annotated[bool, typer.Option("--keep-daemon/--stop-daemon", help="Leave the daemon running to look at.")]


def demo(directory: Directory = Path("demo-output"), steps: Steps = None, keep_daemon: KeepDaemon = True) -> None:
    """Train a small Llama on two ranks, kill it, resume it, and compare it with a run that was left alone.

    Takes one to two minutes on two cores, and says after its first steps how long it will be on this machine.
    """
    with console.reporting(as_json=False):
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise InvalidRequest(f"the demo needs {', '.join(missing)}", hint="pip install 'holdfast-checkpoint[demo]'")
        from holdfast.demo import main
        from holdfast.demo.config import STEPS

        raise typer.Exit(main(directory, steps or STEPS, keep_daemon))
