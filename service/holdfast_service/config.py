"""Configuration of the service, and the only place that reads its environment.

Every setting is a flag of `holdfast serve`; its default can be set as HOLDFAST_<FLAG>, for example HOLDFAST_ROOT.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from holdfast_files.objects import address
from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.storing import Storing, storing
from holdfast_formats.body import message
from holdfast_formats.disk.compacting import OptimRule
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.naming import CheckpointId, checkpoint_path
from holdfast_formats.printable import visible
from holdfast_formats.rest.operations import EVENTS
from holdfast_formats.rest.retention import COUNT_MAX, RetentionPolicy
from holdfast_formats.root_files import check_local
from holdfast_service import flags

ENVIRONMENT_PREFIX = "HOLDFAST_"
ROOT = Path("holdfast-data")
LISTEN = "127.0.0.1:8420"
NO_LISTENER = NO_SCRUB = NO_END = "none"
NODE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
REPLICA_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
SCRUB_BYTES_PER_SECOND = 20_000_000
RUN_SHARE_PERCENT = 96  # of an automatic --arena-bytes-max that is 94 % of the machine; the rest is for later runs
TOKEN_SHARE_PERCENT = 50  # of what others have not reserved: one token leaves as much for the next one
SCRUB_EVERY_S = 7 * 86_400.0
ON_COMMIT_TIMEOUT_S, ON_EVENT_TIMEOUT_S = 600.0, 60.0
TRASH_DAYS = 7.0
AUDIT_DAYS = 400
FIRST_INHERITED = 3  # the first descriptor that a service manager passes (sd_listen_fds)
_PLAIN = frozenset({"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"})


class RootPlace(NamedTuple):
    """Where a root is: a directory, or a bucket and the directory of this machine for what its daemon keeps, which may be
    lost.
    """

    label: str  # as messages name it, and --root takes it
    directory: Path
    bucket: BucketAddress | None = None

    def checkpoint(self, run: str, step: int) -> str:
        """A checkpoint's directory, or the address by which it is opened in the bucket."""
        if self.bucket is not None:
            return f"{self.label}/{CheckpointId(run, step)}"
        return str(self.directory / checkpoint_path(run, step))


class Config(BaseModel):
    """Settings of one daemon. `listen` is None without a REST listener (an embedded daemon)."""

    model_config = ConfigDict(frozen=True)

    arguments: tuple[str, ...] = ()  # what it was made of, besides the environment
    root: InstanceOf[BucketAddress] | Path = ROOT
    state: Path | None = None
    alone: bool = False
    encryption: str = ""
    storage_class: str = ""
    listen: tuple[str, int] | None = ("127.0.0.1", 8420)
    socket: Path
    node: str = Field(pattern=NODE_NAME)
    keep: int | None = Field(default=None, ge=1)
    keep_full: int | None = Field(default=None, ge=1, le=COUNT_MAX)
    keep_optim: OptimRule | None = None
    keep_optim_full: int | None = Field(default=None, ge=1, le=COUNT_MAX)
    catalog: str | None = None
    arena_bytes_max: int | None = Field(default=None, ge=0)
    run_share: int = Field(default=RUN_SHARE_PERCENT, ge=1, le=100)
    token_share: int = Field(default=TOKEN_SHARE_PERCENT, ge=1, le=100)
    spill: Literal["auto", "never"] = "auto"
    write_bytes_per_second: int | None = Field(default=None, ge=1)
    replica: tuple[tuple[str, Path], ...] = ()
    replica_bytes_per_second: int | None = Field(default=None, ge=1)
    tier: tuple[tuple[str, InstanceOf[BucketAddress] | Path], ...] = ()
    tier_keep: int | None = Field(default=None, ge=1, le=COUNT_MAX)
    tier_bytes_per_second: int | None = Field(default=None, ge=1)
    tier_storage_class: str = ""
    export_root: Path | None = None
    loopback_open: bool = False
    behind_tls: bool = False
    insecure_no_tokens: bool = False
    metrics_open: bool = False
    allowed_hosts: frozenset[str] = frozenset()
    logins: Path | None = None
    audit_days: int = Field(default=AUDIT_DAYS, ge=1, le=36_500)
    socket_group: str | None = None
    exchange: tuple[str, int] | None = None
    scrub_bytes_per_second: int = Field(default=SCRUB_BYTES_PER_SECOND, ge=0)
    scrub_every: float = Field(default=SCRUB_EVERY_S, gt=0)
    trash_days: float | None = Field(default=TRASH_DAYS, ge=0, le=36_500)
    on_commit: str | None = None
    on_commit_timeout: float = Field(default=ON_COMMIT_TIMEOUT_S, gt=0)
    on_event: str | None = None
    on_event_kinds: tuple[str, ...] = ()
    on_event_timeout: float = Field(default=ON_EVENT_TIMEOUT_S, gt=0)
    notify: Path | None = None
    watch: tuple[str, ...] = ()
    watch_tokens: Path | None = None
    watch_ca: Path | None = None
    silence_max: float = Field(default=60.0, gt=0)
    exit_when_idle: float | None = Field(default=None, gt=0)
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"

    @field_validator("listen", "exchange", mode="before")
    @classmethod
    def _parse_listen(cls, value: object) -> object:
        if value == NO_LISTENER:
            return None
        if isinstance(value, str):
            host, colon, port = value.rpartition(":")
            if not colon or not host or not port.isdigit() or int(port) > 65_535:
                raise ValueError(f"{value!r} is not HOST:PORT")
            return host.strip("[]"), int(port)
        return value

    @field_validator("root", mode="before")
    @classmethod
    def _parse_root(cls, value: object) -> object:
        return _bucket(value) if isinstance(value, str) and address.is_address(value) else value

    @field_validator("root", "state", "export_root")
    @classmethod
    def _check_directory(cls, value: BucketAddress | Path | None) -> BucketAddress | Path | None:
        if isinstance(value, Path):
            _check_local(value)
        return value

    @field_validator("replica", mode="before")
    @classmethod
    def _parse_replica(cls, value: object) -> object:
        if not isinstance(value, str | list):
            return value
        return tuple((name, _local(text)) for name, text in named_places([value] if isinstance(value, str) else value))

    @field_validator("tier", mode="before")
    @classmethod
    def _parse_tier(cls, value: object) -> object:
        if not isinstance(value, str | list):
            return value
        named = named_places([value] if isinstance(value, str) else value)
        return tuple((name, _bucket(text) if address.is_address(text) else _local(text)) for name, text in named)

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _parse_hosts(cls, value: object) -> object:
        return (
            frozenset(name.strip().lower() for name in value.split(",") if name.strip()) if isinstance(value, str) else value
        )

    @field_validator("scrub_bytes_per_second", mode="before")
    @classmethod
    def _parse_rate(cls, value: object) -> object:
        return 0 if value == NO_SCRUB else value

    @field_validator("watch", "on_event_kinds", mode="before")
    @classmethod
    def _parse_list(cls, value: object) -> object:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list):
            return given
        return tuple(part.strip() for one in given for part in str(one).split(",") if part.strip())

    @field_validator("on_event_kinds")
    @classmethod
    def _check_kinds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = next((kind for kind in value if kind not in EVENTS), None)
        if unknown is not None:
            raise ValueError(f"{unknown!r} is not a kind of event; docs/api.md lists them")
        return value

    @field_validator("trash_days", mode="before")
    @classmethod
    def _parse_days(cls, value: object) -> object:
        return None if value == NO_END else value

    @field_validator("on_commit", "on_event")
    @classmethod
    def _check_command(cls, value: str | None) -> str | None:
        if value is not None:
            command_words(value)
        return value

    @model_validator(mode="after")
    def _check_state(self) -> Config:
        if self.state is not None and isinstance(self.root, Path):
            raise ValueError("a root that is a directory holds what its daemon keeps: --state is for one in a bucket")
        buckets = [place for _, place in self.tier if isinstance(place, BucketAddress)]
        if self.alone and isinstance(self.root, Path) and not buckets:
            raise ValueError("only a root or a tier in a bucket needs --alone")
        for name, _ in self.tier:
            if name in dict(self.replica):
                raise ValueError(f"a tier and a replica have the name {name!r}: name them, NAME=PLACE")
        if self.alone and not isinstance(self.root, Path) and not buckets and is_shared(self.catalog_url):
            raise ValueError("--alone states that no other daemon writes, and a catalog in PostgreSQL is for several")
        if self.encryption and isinstance(self.root, Path) and not buckets:
            raise ValueError("only what is written to a bucket has --encryption")
        if self.storage_class and isinstance(self.root, Path):
            raise ValueError("only a root in a bucket has --storage-class: for a tier there is --tier-storage-class")
        if self.tier_storage_class and not buckets:
            raise ValueError("only a tier in a bucket has --tier-storage-class")
        if self.write_bytes_per_second is not None and not isinstance(self.root, Path):
            raise ValueError("--write-bytes-per-second cannot limit the writes to a bucket")
        return self

    @model_validator(mode="after")
    def _check_usual(self) -> Config:
        try:
            self.usual_policy  # noqa: B018 - it validates
        except ValidationError as error:
            raise ValueError(f"--keep-optim: {message(error)}") from error
        return self

    @field_validator("encryption", "storage_class", "tier_storage_class")
    @classmethod
    def _check_storing(cls, value: str, info: ValidationInfo) -> str:
        try:
            storing(**{"encryption" if info.field_name == "encryption" else "storage_class": value})
        except InvalidRequest as error:
            raise ValueError(f"{error.detail}; {error.hint}") from None
        return value

    @property
    def storing(self) -> Storing:
        """How objects of a root in a bucket are stored."""
        return storing(self.encryption, self.storage_class)

    @property
    def tier_storing(self) -> Storing:
        """How objects of tiers in buckets are stored."""
        return storing(self.encryption, self.tier_storage_class)

    @property
    def usual_policy(self) -> RetentionPolicy:
        """The thinning and compacting of runs without a policy of their own."""
        return RetentionPolicy(keep_full=self.keep_full, optim=self.keep_optim, optim_full=self.keep_optim_full)

    @property
    def place(self) -> RootPlace:
        """Where the root is."""
        if isinstance(self.root, Path):
            root = self.root.resolve()
            return RootPlace(str(root), root)
        state = self.state or state_directory() / address.state_name(self.root)
        return RootPlace(self.root.label, state.resolve(), self.root)

    @property
    def catalog_url(self) -> str:
        return self.catalog or catalog_url(self.place.directory)


def state_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Directory for what programs of this user keep; a relative XDG_STATE_HOME counts as none."""
    known = os.environ if environment is None else environment
    state = known.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "holdfast"


def is_shared(url: str) -> bool:
    """Whether daemons of several nodes can share the catalog at this URL."""
    return url.startswith("postgresql")


def catalog_url(root: Path) -> str:
    """The default catalog URL of a root."""
    return f"sqlite:///{root.resolve() / 'catalog.sqlite'}"


def command_words(command: str) -> tuple[str, ...]:
    """The words of a command, split as by a shell, the first one replaced by the program's path; no shell runs.

    `ValueError` for a command without words, with an open quotation, or whose program is not found.
    """
    words = shlex.split(command)
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise ValueError(f"{words[0]!r} is not a program that can be run" if words else "the command is empty")
    return (str(Path(program).absolute()), *words[1:])


def successor_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a successor daemon, without the service manager's variables for this process."""
    known = os.environ if environment is None else environment
    managed = ("LISTEN_", "WATCHDOG_")
    return {k: v for k, v in known.items() if not k.startswith(managed) and k not in ("NOTIFY_SOCKET", "FDSTORE")}


def supervised_environment(notify: Path, silent_s: float, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a daemon below a holder, which is its service manager at `notify`, and takes it for hung after
    `silent_s` seconds of silence. Descriptors are kept at the holder's other socket.
    """
    manager = {"NOTIFY_SOCKET": str(notify), "WATCHDOG_USEC": str(int(silent_s * 1_000_000)), "FDSTORE": "0"}
    return successor_environment(environment) | manager


def plain_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of --on-event and --on-commit commands: what programs need to start and to write text, without the
    daemon's own settings.
    """
    known = os.environ if environment is None else environment
    return {name: value for name, value in known.items() if name in _PLAIN or name.startswith("LC_")}


def _check_local(path: str | Path) -> None:
    try:
        check_local(path)
    except InvalidRequest as error:
        raise ValueError(f"{error.detail}; {error.hint}") from None


def _local(text: str) -> Path:
    _check_local(text)
    return Path(text)


def _bucket(text: str) -> BucketAddress:
    try:
        return address.parse(text)
    except InvalidRequest as error:
        raise ValueError(f"{error.detail}; {error.hint}") from None


def named_places(given: Sequence[str]) -> list[tuple[str, str]]:
    """Parse NAME=PLACE or PLACE, separated by commas, where a place is a directory or an address: names and places.

    `ValueError` for a name that appears twice.
    """
    places: dict[str, str] = {}
    for text in (part.strip() for one in given for part in one.split(",") if part.strip()):
        named, equals, stated = ("", "", text) if address.is_address(text) else text.partition("=")
        place = stated if equals else text
        name = named if equals else Path(place).name
        if (not stated and equals) or not re.fullmatch(REPLICA_NAME, name):
            raise ValueError(f"{visible(text)} is not NAME=PLACE; the name may have letters, digits and . _ -")
        if name in places:
            raise ValueError(f"two places have the name {name!r}: name them, NAME=PLACE")
        places[name] = place
    return list(places.items())


def check_apart(root: BucketAddress | Path, copies: Sequence[tuple[str, BucketAddress | Path]]) -> None:
    """`InvalidRequest` if a replica or tier is inside the root, contains it, or overlaps another one."""
    known = [("the root", _resolved(root))]
    for name, given in copies:
        place = _resolved(given)
        for other, other_place in known:
            if place == other_place or place in other_place.parents or other_place in place.parents:
                raise InvalidRequest(
                    f"--replica or --tier: one of {_shown(given)} and {other} ({_shown(other_place)}) is inside the other",
                    hint="use a separate directory, on another disk, or another prefix",
                )
        known.append((f"replica {name}", place))


def _resolved(place: BucketAddress | Path) -> PurePath:
    """A bucket as a path that no directory has."""
    return place.resolve() if isinstance(place, Path) else PurePosixPath("s3:", place.bucket, place.prefix)


def _shown(place: BucketAddress | PurePath) -> str:
    return place.label if isinstance(place, BucketAddress) else str(place).replace("s3:/", "s3://", 1)


def default_socket(environment: Mapping[str, str]) -> Path:
    """A socket in the user's runtime directory, or in a directory of the user's own under /tmp."""
    return runtime_directory(environment) / "holdfast.sock"


def runtime_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Directory for files that other programs of the same user must find; a relative XDG_RUNTIME_DIR counts as none."""
    runtime = (os.environ if environment is None else environment).get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "holdfast" if os.path.isabs(runtime) else Path(f"/tmp/holdfast-{os.getuid()}")


class StoredDescriptors(NamedTuple):
    """The service manager's fd store: its address, and the descriptors kept from the last start, by name."""

    notify: str
    inherited: tuple[tuple[str, int], ...]


def fd_store(environment: Mapping[str, str] | None = None) -> StoredDescriptors | None:
    """The service manager's fd store; None if there is none, or if it stores nothing (systemd without
    FileDescriptorStoreMax=). Versions of systemd before 254 set neither variable.
    """
    known = os.environ if environment is None else environment
    notify, room = known.get("NOTIFY_SOCKET", ""), known.get("FDSTORE", "")
    if not notify or room == "0":
        return None
    if known.get("LISTEN_PID") != str(os.getpid()):
        return StoredDescriptors(notify, ())
    names = known.get("LISTEN_FDNAMES", "").split(":")
    return StoredDescriptors(notify, tuple((name, FIRST_INHERITED + i) for i, name in enumerate(names) if name))


class Notified(NamedTuple):
    """Where a service manager waits for messages of this process (sd_notify), None without one; and the seconds of silence
    after which its watchdog ends this process, None without a watchdog.
    """

    address: str | None
    watchdog_s: float | None


def service_manager(environment: Mapping[str, str] | None = None) -> Notified:
    """The service manager of this process; WATCHDOG_PID may name another one."""
    known = os.environ if environment is None else environment
    after, of = known.get("WATCHDOG_USEC", ""), known.get("WATCHDOG_PID", str(os.getpid()))
    watchdog_s = int(after) / 1e6 if after.isdecimal() and int(after) and of == str(os.getpid()) else None
    return Notified(known.get("NOTIFY_SOCKET") or None, watchdog_s)


def otel_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The OTEL_* variables that are set. The OpenTelemetry SDK reads them itself."""
    known = os.environ if environment is None else environment
    return {name: value for name, value in known.items() if name.startswith("OTEL_")}


def default_node() -> str:
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in platform.node())[:63].lstrip("._-")
    return name or "node"


def parse(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Config:
    """Build the configuration from flags and environment; `InvalidRequest` names the wrong flag."""
    known = dict(os.environ if environment is None else environment)
    defaults = {name: field.get_default() for name, field in Config.model_fields.items()}
    given = vars(flags.parser(defaults).parse_args(arguments))
    settings: dict[str, object] = {
        "arguments": tuple(arguments),
        "socket": default_socket(known),
        "node": default_node(),
    }
    for flag, value in given.items():
        chosen = value if value is not None else known.get(ENVIRONMENT_PREFIX + flag.upper())
        if chosen is not None:
            settings[flag] = chosen
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        flag = "".join(f"--{name}: ".replace("_", "-") for name in first["loc"][:1])  # none where several do not agree
        raise InvalidRequest(f"{flag}{message(error)}", hint="see `holdfast serve --help`") from error
