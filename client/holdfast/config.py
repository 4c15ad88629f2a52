"""What the client takes from its surroundings. The only client file that reads the environment."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest

DEFAULT_URL = "http://127.0.0.1:8420"
DEFAULT_ROOT = Path("holdfast-data")
TOKEN_CHARACTERS_MAX = 4096  # a proxy in front may have tokens of its own


class LaunchInfo(NamedTuple):
    """Who this process is among those started together, as torchrun tells it; a process alone is rank 0 of 1."""

    rank: int
    world: int
    run_id: str | None
    restart_count: int
    local_world: int | None  # how many of them are on this machine, where the launcher says


def default_socket() -> Path:
    """The socket of this user's daemon."""
    return runtime_directory() / "holdfast.sock"


def runtime_directory() -> Path:
    """Where this user's daemon leaves what the user's programs are to find; without one of the system's, under /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "holdfast" if runtime else Path(f"/tmp/holdfast-{os.getuid()}")


def has_display() -> bool:
    """Whether a browser could open a window here."""
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def given_url() -> str | None:
    """The service's address where HOLDFAST_URL states one."""
    return os.environ.get("HOLDFAST_URL") or None


def default_url() -> str:
    """HOLDFAST_URL, else the address at which `holdfast serve` listens unless told otherwise."""
    return given_url() or DEFAULT_URL


def take_over() -> bool:
    """Whether HOLDFAST_TAKE_OVER says that this job takes its run over from another one that lives."""
    return os.environ.get("HOLDFAST_TAKE_OVER", "").lower() in ("1", "true", "yes")


def stated_token() -> str | None:
    """HOLDFAST_TOKEN, where it says something."""
    stated = os.environ.get("HOLDFAST_TOKEN", "").strip()
    return check_token(stated, "HOLDFAST_TOKEN") if stated else None


def given_token() -> str | None:
    """HOLDFAST_TOKEN, else what the user keeps in ~/.config/holdfast/token; `InvalidRequest` where others can read that."""
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
            f"{path} can be read by other users", hint=f"chmod 600 {path}, and revoke the token if they did"
        )
    return check_token(text, str(path)) if text else None


def check_token(text: str, where: str) -> str:
    """The token itself, or `InvalidRequest` for what could not stand in a header. The text is not repeated."""
    if not text.isascii() or not text.isprintable() or " " in text or len(text) > TOKEN_CHARACTERS_MAX:
        raise InvalidRequest(f"{where} holds no token", hint="`holdfast token create` prints one")
    return text


def launch_info(environment: Mapping[str, str] | None = None) -> LaunchInfo:
    """Read RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, and torchrun's run id and restart count.

    `InvalidRequest` for what is no number.
    """
    given = os.environ if environment is None else environment
    rank, world = _number(given, "RANK", 0), _number(given, "WORLD_SIZE", 1)
    if rank >= world:
        raise InvalidRequest(f"RANK is {rank} in a world of {world}", hint="set RANK and WORLD_SIZE together, or neither")
    run_id = given.get("TORCHELASTIC_RUN_ID")
    return LaunchInfo(
        rank=rank,
        world=world,
        run_id=None if run_id in (None, "", "none") else run_id,  # "none" is torchrun's default for every job
        restart_count=_number(given, "TORCHELASTIC_RESTART_COUNT", 0),
        local_world=_number(given, "LOCAL_WORLD_SIZE", 0) or None,
    )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise InvalidRequest(f"{name} is {text!r}, not a whole number", hint="torchrun sets it; unset it for one process")
    return int(text)
