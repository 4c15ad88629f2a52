"""What saves, copies and checks asked of a bucket, in words, with an estimate of the price at one cloud."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast_files.objects.traffic import AWS_USD_PER_READ, READS, WRITES, aws_usd


def of_save(measured: Mapping[str, float | None]) -> str:
    """By the members of `SaveTimes`; empty where nothing was asked."""
    if not measured.get("requests"):
        return ""
    writes, reads, usd = _split(measured)
    checks = measured.get("check_requests") or 0
    repeated = (measured.get("retries") or 0) + (measured.get("check_retries") or 0)
    return (
        f"{measured['requests']:.0f} to save it ({writes:.0f} writes and lists, {reads:.0f} reads), {checks:.0f} to verify "
        f"it; {repeated:.0f} repeated; {usd + checks * AWS_USD_PER_READ:.5f} USD at AWS's prices"
    )


def of_copy(measured: Mapping[str, float | None] | None) -> str:
    """The same for a copy in a tier, with its read-back."""
    if not measured or not measured.get("requests"):
        return ""
    writes, reads, usd = _split(measured)
    return (
        f"{measured['requests']:.0f} requests ({writes:.0f} writes and lists, {reads:.0f} reads), "
        f"{measured.get('retries') or 0:.0f} repeated; {usd:.5f} USD at AWS's prices"
    )


def _split(measured: Mapping[str, float | None]) -> tuple[float, float, float]:
    """Writes, reads, and their price."""
    kinds = {kind: measured.get(f"requests_{kind}") or 0 for kind in (*WRITES, *READS)}
    return sum(kinds[one] for one in WRITES), sum(kinds[one] for one in READS), aws_usd(kinds)
