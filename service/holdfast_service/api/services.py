"""What the HTTP edge is given by whoever wires it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Query, Request

from holdfast_formats import rest
from holdfast_service.control.catalog import Catalog
from holdfast_service.control.rotation import Rotation
from holdfast_service.daemon.remote import RemoteRanks
from holdfast_service.storage import Tier

LIMIT_MAX = 1000


@dataclass(frozen=True)
class Services:
    """The rooms below. `files_root` is the tier's directory where it has one: then files are read from it directly.

    `remote` takes uploads; a service without a daemon has none. `restore_bytes` says how many bytes were read for restores,
    by whom.
    """

    tier: Tier
    catalog: Catalog
    root: str
    version: str
    node: Callable[[], rest.Node]
    rotation: Rotation
    files_root: Path | None = None
    remote: RemoteRanks | None = None
    restore_bytes: Callable[[], Mapping[str, int]] = dict


def _services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


Wired = Annotated[Services, Depends(_services)]
Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="most items of a page")]
Cursor = Annotated[str | None, Query(max_length=4096, description="`next` of the page before; opaque")]
