"""The error for a state that no existing checkpoint can restore, shared by daemon and client."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast_formats.errors import StateMismatch


def lacking(run: str, offers: Mapping[int, Collection[str]], wanted: Collection[str]) -> StateMismatch:
    """The error if checkpoints exist and none has all the wanted groups; `offers` are their groups, by step.

    Its member `best` is the newest step with the most of the wanted groups; `offered` are those groups.
    """
    step = max(offers, key=lambda step: (len(set(wanted) & set(offers[step])), step))
    offered = sorted(set(wanted) & set(offers[step]))
    missing = sorted(set(wanted) - set(offered))
    ignored = ", ".join(repr(f"{group}/*") for group in missing)
    return StateMismatch(
        f"no checkpoint of {run} has all requested groups: step {step} has the most, but lacks {', '.join(missing)}",
        hint=f"restore the rest with exclude=[{ignored}], strict=False or groups={tuple(offered)}; start from "
        "scratch in another run",
        missing=missing,
        offered=offered,
        best=step,
    )
