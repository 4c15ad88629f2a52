"""The button for an alert: a link to the place of the repair, or a form that does it."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

from holdfast_formats.rest.measurements import Alert
from holdfast_service.wings.console.viewer_api import to


class Button(NamedTuple):
    """A link where there are no `fields`, else a form that posts them."""

    label: str
    address: str
    fields: tuple[tuple[str, str], ...] | None = None


TITLES = {
    "run-died": "Died",
    "no-commit": "Nothing is committed",
    "storage-slow": "Storage is slow",
    "saves-failing": "Saves fail",
    "saves-dropped": "Saves are dropped",
    "checkpoint-missing": "A checkpoint is gone",
    "checkpoint-damaged": "Damaged checkpoints",
    "checkpoint-unhealthy": "NaN or infinite values",
    "checkpoint-frozen": "No training happened",
    "removal-waits": "Nothing is removed",
    "not-verified": "Not verified",
    "disk-nearly-full": "The disk is nearly full",
    "quota-nearly-full": "A quota is nearly used up",
    "saves-too-seldom": "Saves are too rare",
    "saves-too-often": "Saves are too frequent",
    "bucket-refuses": "The bucket refuses requests",
    "replica-lags": "A replica is behind",
    "replica-behind": "A replica is behind",
    "replica-failing": "Copying fails",
    "replica-damaged": "Damaged copies",
    "replica-lost": "A replica is lost",
    "node-lost": "A node is lost",
    "clock-differs": "Clocks differ",
}


def title(code: str) -> str:
    return TITLES.get(code, code.replace("-", " ").capitalize())


def button(alert: Alert, *, on_its_page: bool = False) -> Button | None:
    """What mends it. The run's own page has a button to resume, and needs no link to itself."""
    if alert.run is None:
        return _of_the_service(alert)
    run, step = alert.run, alert.step
    mend = f"{to(run)}/mend"
    if alert.remedy == "resume" and step is not None and not on_its_page:
        return Button(f"Resume from step {step}", to(run, step, "restore"))
    if alert.remedy == "restore-healthy" and alert.healthy is not None and not on_its_page:
        return Button(f"Resume from step {alert.healthy}", to(run, alert.healthy, "restore"))
    if alert.remedy == "raise-quota":
        return _form("Raise the quota by half", mend, remedy="raise-quota")
    if alert.remedy == "raise-team-quota":
        return Button("Look at the quotas", "/quotas")
    if alert.remedy == "keep-fewer":
        return Button("Choose what to keep", f"{to(run)}/policy")
    if alert.remedy == "verify" and step is not None:
        return _form(f"Verify step {step}", mend, remedy="verify", step=str(step))
    if alert.remedy == "repair" and step is not None:
        return _form(f"Repair step {step}", mend, remedy="repair", step=str(step))
    if alert.remedy == "retry-replicas" and alert.subject:
        return _form("Copy again now", mend, remedy="retry-replicas", subject=alert.subject)
    label, place = _LOOKS.get(alert.code, ("Look at the saves", ""))
    return Button(label, f"{to(run)}{place}") if place or not on_its_page else None


def _form(label: str, address: str, **fields: str) -> Button:
    return Button(label, address, tuple(sorted(fields.items())))


_LOOKS = {
    "checkpoint-missing": ("See what is there", ""),
    "removal-waits": ("Look at the policy", "/policy"),
    "saves-failing": ("See why", "#failed"),
    "checkpoint-unhealthy": ("Look at its layers", "/health"),
    "checkpoint-frozen": ("Compare them", "/compare"),
    "saves-too-seldom": ("How often to save", "#interval"),
    "saves-too-often": ("How often to save", "#interval"),
}


def _of_the_service(alert: Alert) -> Button:
    path = f"/alerts/{quote(alert.code, safe='')}/{quote(alert.subject or '', safe='')}"
    if alert.remedy == "retry-replicas":
        return _form("Copy again now", path, do="retry")
    if alert.remedy == "forget-node" and alert.subject:
        return _form("Forget the node", f"/nodes/{quote(alert.subject, safe='')}/forget", back="overview")
    return Button("Look at the nodes", "/nodes")
