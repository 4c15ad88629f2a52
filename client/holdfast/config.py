"""Settings of the client. This is the only client file that reads the environment."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest

DEFAULT_URL = "http://127.0.0.1:8420"
DEFAULT_ROOT = Path("holdfast-data")
LAUNCH_CHARACTERS_MAX = 200  # a daemon takes 256: restart and construction are counted behind it
TOKEN_CHARACTERS_MAX = 4096  # a proxy in front may have tokens of its own


class Launcher(NamedTuple):
    """The variables in which a launcher other than torchrun tells a process its place."""

    name: str
    rank: str
    world: str
    local_world: str | None
    instead: str = "torch.distributed.init_process_group()"  # the call after which the variables are not needed


# SLURM_NTASKS does not tell: a batch script has it too, in which one process runs.
LAUNCHERS = (
    Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Launcher("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", None),
    Launcher(
        "paddle.distributed.launch",
        "PADDLE_TRAINER_ID",
        "PADDLE_TRAINERS_NUM",
        "PADDLE_LOCAL_SIZE",
        "paddle.distributed.fleet.init() and holdfast.integrations.paddle.state()",
    ),
)


class LaunchInfo(NamedTuple):
    """Rank and world of this process as set by torchrun; a single process is rank 0 of 1."""

    rank: int
    world: int
    run_id: str | None
    restart_count: int
    local_world: int | None  # how many of them are on this machine, where the launcher says
    launch: str | None  # the name of the launch, where HOLDFAST_LAUNCH states one


def default_socket() -> Path:
    """The unix socket of this user's daemon."""
    return runtime_directory() / "holdfast.sock"


def runtime_directory() -> Path:
    """Where this user's daemon puts files for the user's programs; below /tmp if the system has no runtime directory. A
    relative one is ignored (XDG specification): each process would resolve it differently.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "holdfast" if os.path.isabs(runtime) else Path(f"/tmp/holdfast-{os.getuid()}")


def state_directory() -> Path:
    """Directory for what programs of this user keep; a relative XDG_STATE_HOME counts as none."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "holdfast"


def has_display() -> bool:
    """Whether a browser could open a window on this machine."""
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def uploads_checkpoints() -> bool:
    """Whether transformers' callback for Weights & Biases reads a checkpoint's files in `on_save`."""
    return os.environ.get("WANDB_LOG_MODEL", "").lower() == "checkpoint"


def given_url() -> str | None:
    """The value of HOLDFAST_URL, if set."""
    return os.environ.get("HOLDFAST_URL") or None


def default_url() -> str:
    """HOLDFAST_URL, or the default address of `holdfast serve`."""
    return given_url() or DEFAULT_URL


def take_over() -> bool:
    """Whether HOLDFAST_TAKE_OVER is set: this job takes its run over from another active job."""
    return os.environ.get("HOLDFAST_TAKE_OVER", "").lower() in ("1", "true", "yes")


def stated_token() -> str | None:
    """HOLDFAST_TOKEN, if it is not empty."""
    stated = os.environ.get("HOLDFAST_TOKEN", "").strip()
    return check_token(stated, "HOLDFAST_TOKEN") if stated else None


def given_token() -> str | None:
    """HOLDFAST_TOKEN, or the content of ~/.config/holdfast/token; `InvalidRequest` if others can read that file."""
    stated = stated_token()
    if stated is not None:
        return stated
    kept = os.environ.get("XDG_CONFIG_HOME") or os.environ.get("HOME")
    if not kept:
        return None
    path = Path(kept) / ("" if os.environ.get("XDG_CONFIG_HOME") else ".config") / "holdfast" / "token"
    try:
        with open(path, encoding="latin-1") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(TOKEN_CHARACTERS_MAX + 2).strip()
    except OSError:
        return None
    if stat.S_IMODE(mode) & 0o077:
        raise InvalidRequest(
            f"the token file {path} is readable by other users",
            hint=f"run `chmod 600 {path}`; if others may have read the file, revoke the token",
        )
    return check_token(text, str(path)) if text else None


def check_token(text: str, where: str) -> str:
    """The token; `InvalidRequest` if it is invalid in an HTTP header. The error does not contain it."""
    if not text.isascii() or not text.isprintable() or " " in text or len(text) > TOKEN_CHARACTERS_MAX:
        raise InvalidRequest(f"{where} does not contain a token", hint="create one with `holdfast token create`")
    return text


def launch_info(environment: Mapping[str, str] | None = None) -> LaunchInfo:
    """Read RANK, WORLD_SIZE, the local world size, torchrun's run id and restart count, and HOLDFAST_LAUNCH.

    Raises `InvalidRequest` for a value that is not a number, and for a launch ID that no daemon would take.
    """
    given = os.environ if environment is None else environment
    rank, world = _number(given, "RANK", 0), _number(given, "WORLD_SIZE", 1)
    if rank >= world:
        raise InvalidRequest(
            f"RANK={rank} is not valid with WORLD_SIZE={world}", hint="set RANK and WORLD_SIZE together, or neither"
        )
    run_id = given.get("TORCHELASTIC_RUN_ID")
    return LaunchInfo(
        rank=rank,
        world=world,
        run_id=None if run_id in (None, "", "none") else run_id,  # "none" is torchrun's default for every job
        restart_count=_number(given, "TORCHELASTIC_RESTART_COUNT", 0),
        local_world=_local_world(given),
        launch=_launch_name(given),
    )


def check_placed(environment: Mapping[str, str] | None = None) -> None:
    """Raise `InvalidRequest` if a launcher has started several processes and none of RANK and WORLD_SIZE is set.

    Each of them would pass for the only rank of a training of its own, under the same name.
    """
    given = os.environ if environment is None else environment
    if "RANK" in given or "WORLD_SIZE" in given:
        return
    for launcher in LAUNCHERS:
        world = given.get(launcher.world, "")
        if world.isdigit() and int(world) > 1:
            raise InvalidRequest(
                f"{launcher.name} has started {world} processes, and RANK and WORLD_SIZE are not set",
                hint=f"call {launcher.instead} first, or set RANK=${launcher.rank}, "
                f"WORLD_SIZE=${launcher.world} and HOLDFAST_LAUNCH in each of them; if each trains a run of its own, set "
                "RANK=0 and WORLD_SIZE=1",
            )


def _local_world(environment: Mapping[str, str]) -> int | None:
    names = ["LOCAL_WORLD_SIZE", *(launcher.local_world for launcher in LAUNCHERS if launcher.local_world)]
    return next((number for name in names if (number := _number(environment, name, 0))), None)


def _launch_name(environment: Mapping[str, str]) -> str | None:
    name = environment.get("HOLDFAST_LAUNCH", "").strip()
    if len(name) > LAUNCH_CHARACTERS_MAX or not name.isprintable():
        raise InvalidRequest(
            "HOLDFAST_LAUNCH is not a valid launch ID",
            hint=f"use 1 to {LAUNCH_CHARACTERS_MAX} printable characters, the same on all ranks and new at every start",
        )
    return name or None


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise InvalidRequest(
            f"{name} is {text!r}, not a whole number", hint="torchrun sets it; unset it to run a single process"
        )
    return int(text)
