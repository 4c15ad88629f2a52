"""Names of runs and steps for the shell's TAB.

The service is asked through `http.client`: importing httpx, pydantic and the models of the API takes longer than the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from holdfast import config
from holdfast.read.checkpoint_root import CheckpointRoot, root_of
from holdfast.rest import owner_token
from holdfast_formats.errors import StorageFailed

LATEST: Literal["latest"] = "latest"
LATEST_HEALTHY: Literal["latest-healthy"] = "latest-healthy"
BEST = "best"
LISTED_MAX = 500
ANSWER_BYTES_MAX = 4 * 2**20
TIMEOUT_S = 5.0


class NamePlace(NamedTuple):
    """Where names are: in a root, or known to a service."""

    root: CheckpointRoot | None
    url: str | None

    def runs(self, prefix: str) -> Iterator[str]:
        if self.root is not None:
            return (name for name in self.root.runs() if name.startswith(prefix))
        return (run["name"] for run in self._items("/v1/runs", prefix=prefix))

    def checkpoints(self, run: str) -> Iterator[str]:
        """RUN@latest and the like, then RUN@STEP, newest first; none if the run has no checkpoint."""
        names: tuple[str, ...] = (LATEST,)
        if self.root is not None:
            steps = self.root.steps(run)
        else:
            names = (LATEST, LATEST_HEALTHY, BEST)
            steps = [checkpoint["step"] for checkpoint in self._items(f"/v1/runs/{quote(run, safe='')}/checkpoints")]
        return (f"{run}@{name}" for name in (*names, *steps) if steps)

    def tags(self, prefix: str) -> Iterator[str]:
        """Tags of runs, which only a service knows."""
        return iter(()) if self.root is not None else (tag["tag"] for tag in self._items("/v1/tags", prefix=prefix))

    def deleted(self) -> Iterator[str]:
        """Runs in the service's trash."""
        return iter(dict.fromkeys(entry["run"] for entry in self._items("/v1/trash")))

    def _items(self, path: str, **query: str) -> list[dict[str, Any]]:
        """A list's first page; `StorageFailed` or `OSError` if none can be had."""
        found = owner_token.owners(str(self.url)) if config.stated_token() is None else None
        token = config.given_token() if found is None else found.token
        parts = urlsplit(str(self.url) if found is None else found.url)
        connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = connect(parts.netloc, timeout=TIMEOUT_S)
        try:
            connection.request(
                "GET",
                f"{parts.path.rstrip('/')}{path}?{urlencode({**query, 'limit': LISTED_MAX})}",
                headers={} if token is None else {"Authorization": f"Bearer {token}"},
            )
            answer = json.loads(connection.getresponse().read(ANSWER_BYTES_MAX))
            return list(answer["items"])
        except (HTTPException, ValueError, KeyError, TypeError) as error:
            raise StorageFailed(
                f"{self.url} did not answer with a list",
                hint="HOLDFAST_URL must be the address of a Holdfast daemon",
            ) from error
        finally:
            connection.close()


def place(root: CheckpointRoot | None, url: str | None) -> NamePlace:
    """The place for these options; without any, the default address, or ./holdfast-data if nothing listens there."""
    if root is not None or url is not None or config.given_url() is not None:
        return NamePlace(root, url or config.default_url())
    known = NamePlace(None, config.default_url())
    try:
        known.runs("")
    except (OSError, StorageFailed):
        return NamePlace(root_of(config.DEFAULT_ROOT), None)
    return known
