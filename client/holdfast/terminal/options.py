"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from holdfast.config import state_directory
from holdfast.read.checkpoint_root import CheckpointRoot, root_of
from holdfast.terminal import completion
from holdfast_files.objects import address
from holdfast_files.objects.address import BucketAddress
from holdfast_formats.errors import InvalidRequest

SELECTED = "RUN@STEP, RUN@latest (or RUN), RUN@latest-healthy, RUN@best, or RUN@best:METRIC[:max]"


def _root(given: str) -> CheckpointRoot:
    try:
        return root_of(given)
    except InvalidRequest as error:
        raise typer.BadParameter(f"{error.detail}: {error.hint}") from None


def _local(path: Path | None) -> Path | None:
    if path is not None:
        from holdfast_formats.root_files import check_local  # pydantic, which completion does not wait for

        try:
            check_local(path)
        except InvalidRequest as error:
            raise typer.BadParameter(f"{error.detail}: {error.hint}") from None
    return path


class NamedRoot(NamedTuple):
    """A root as `--root` names it: a directory, or a bucket."""

    directory: Path | None = None
    bucket: BucketAddress | None = None

    @classmethod
    def parse(cls, given: str) -> NamedRoot:
        try:
            if address.is_address(given):
                return cls(bucket=address.parse(given))
        except InvalidRequest as error:
            raise typer.BadParameter(f"{error.detail}: {error.hint}") from None
        return cls(_local(Path(given)))

    @property
    def label(self) -> str:
        """As `--root` takes it."""
        return self.bucket.label if self.bucket is not None else str(self.directory)

    @property
    def daemons(self) -> Path:
        """The directory in which a daemon of this machine that serves the root says where it is."""
        if self.bucket is not None:
            return state_directory() / address.state_name(self.bucket)
        assert self.directory is not None
        return self.directory


def one_place(root: object | None, url: str | None) -> None:
    if root is not None and url is not None:
        raise InvalidRequest("--root and --url cannot be combined", hint="pass only one of them")


Root = Annotated[
    CheckpointRoot | None,
    typer.Option(
        "--root",
        metavar="ROOT",
        help="Read this directory, or s3://BUCKET/PREFIX, directly, without a service.",
        parser=_root,
    ),
]
AnyRoot = Annotated[
    NamedRoot | None,
    typer.Option(
        "--root",
        metavar="ROOT",
        help="This directory, or s3://BUCKET/PREFIX.",
        parser=NamedRoot.parse,
    ),
]
Url = Annotated[str | None, typer.Option("--url", metavar="URL", help="Use the service at this URL.")]
Since = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="TIME", help="Only since then: 90min, 2h or 3d ago, today, yesterday, 2030-01-31[T12:00], in UTC."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help=f"{SELECTED}, or a directory.",
        autocompletion=completion.checkpoints,
    ),
]
