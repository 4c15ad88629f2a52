"""The retention of a run over the REST API: its policy, previews, pins, labels, removal. One function per route."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args
from urllib.parse import quote

import httpx

from holdfast.rest.api import Api
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import Force, Preview, RetentionPolicy, check_label

FORCES: tuple[str, ...] = get_args(Force)


class PolicyInForce(NamedTuple):
    policy: RetentionPolicy
    tag: str


def policy(api: Api, run: str) -> PolicyInForce:
    """The policy in force; the trainer's `keep_last` if none was set."""
    answer = api.request("GET", f"{_run(run)}/policy")
    return PolicyInForce(api.parsed(answer.content, RetentionPolicy), answer.headers.get("etag", ""))


def set_policy(api: Api, run: str, wanted: RetentionPolicy, tag: str) -> Preview:
    """Set the policy, and return what it keeps and removes; `PreconditionFailed` if `tag` is outdated."""
    return api.parsed(_put(api, run, wanted, headers={"If-Match": tag}).content, Preview)


def preview(api: Api, run: str, wanted: RetentionPolicy | None = None) -> Preview:
    """What the policy in force, or this one, keeps and removes and why; changes nothing."""
    if wanted is None:
        return api.parsed(api.request("GET", f"{_run(run)}/retention").content, Preview)
    return api.parsed(_put(api, run, wanted, params={"dry_run": "true"}).content, Preview)


def pin(api: Api, run: str, step: int) -> None:
    """Pin a checkpoint: nothing removes it from now on."""
    api.request("PUT", f"{_step(run, step)}/pin")


def unpin(api: Api, run: str, step: int) -> None:
    api.request("DELETE", f"{_step(run, step)}/pin")


def label(api: Api, run: str, step: int, name: str) -> None:
    """Give the checkpoint a label; several may share one. Nothing removes a checkpoint that has a label."""
    api.request("PUT", f"{_step(run, step)}/labels/{check_label(name)}")


def unlabel(api: Api, run: str, step: int, name: str) -> None:
    api.request("DELETE", f"{_step(run, step)}/labels/{quote(name, safe='')}")


def remove(api: Api, run: str, step: int, force: Force | None = None) -> None:
    """Remove a checkpoint; the newest verified and the newest healthy one of its run only if `force` names it."""
    api.request("DELETE", _step(run, step), params=_forced(force))


def try_remove(api: Api, run: str, step: int, force: Force | None = None) -> bodies.CheckpointInfo:
    """Return what `remove` would remove, or raise its error."""
    answer = api.request("DELETE", _step(run, step), params={**_forced(force), "dry_run": "true"})
    return api.parsed(answer.content, bodies.CheckpointInfo)


def _forced(force: Force | None) -> dict[str, str]:
    return {} if force is None else {"force": force}


def _put(api: Api, run: str, wanted: RetentionPolicy, **parts: Any) -> httpx.Response:
    return api.request("PUT", f"{_run(run)}/policy", json=wanted.model_dump(), **parts)


def _run(run: str) -> str:
    return f"/v1/runs/{quote(run, safe='')}"


def _step(run: str, step: int) -> str:
    return f"{_run(run)}/checkpoints/{step}"
