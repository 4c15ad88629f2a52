"""Checks of `holdfast doctor` for a root in a bucket: what it honours and allows, and rules that would harm checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from holdfast.terminal.probes import Finding
from holdfast_files.objects import answers, client
from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.client import Bucket
from holdfast_files.objects.probe import PROBES, probe
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

CLOCK_SKEW_WARN_S, CLOCK_SKEW_FAIL_S = 5.0, 900.0  # servers refuse signatures that are older
PROBE_WARN_S = 2.0
_RULE = "aws s3api put-bucket-lifecycle-configuration --bucket {bucket} with AbortIncompleteMultipartUpload after 7 days"


class LifecycleRule(NamedTuple):
    """A rule that is enabled: keys that it is for, and what it does."""

    name: str
    prefix: str
    is_narrow: bool  # for objects with a tag or of some size only
    aborts_uploads: bool
    acts: tuple[str, ...]  # on objects: "expires", "archives"
    removes_versions: bool


def examine(place: BucketAddress) -> Iterator[Finding]:
    """Ask the bucket. A few bytes are written below the prefix, and removed."""
    try:
        bucket = client.opened(place.label)
    except CheckpointError as error:
        yield Finding("bucket", "fail", error.detail, error.hint)
        return
    try:
        yield from _opened(bucket, place)
    finally:
        bucket.close()


def _opened(bucket: Bucket, place: BucketAddress) -> Iterator[Finding]:
    try:
        found = bucket.head(naming.ROOT_FILE)
    except CheckpointError as error:
        yield Finding("bucket", "fail", error.detail, error.hint)
        return
    reached = client.place_of(bucket)
    yield Finding("bucket", "ok", f"{place.label} at {reached.endpoint.url}, region {reached.region}")
    what = "has the mark of a root" if found is not None else "has no mark of a root; the first daemon makes it"
    yield Finding("root", "ok", f"{place.label} {what}")
    yield from _written(bucket)
    yield _listed(bucket)
    yield _uploads(bucket)
    yield from _rules(bucket, place)


def _written(bucket: Bucket) -> Iterator[Finding]:
    """What the probe of a daemon's start finds, and the clock."""
    began = time.monotonic()
    try:
        honours = probe(bucket)
        took = time.monotonic() - began
        key = f"{PROBES}/doctor"
        bucket.put(key, b"clock")
        before = time.time()
        found = bucket.head(key)
        skew = 0.0 if found is None else max(before - found.now - 1, found.now - time.time(), 0.0)  # it states whole seconds
        bucket.delete([key])
    except CheckpointError as error:
        yield Finding("write", "fail", error.detail, error.hint)
        return
    yield Finding("write", "ok", f"objects are written, read and removed; {took * 1000:.0f} ms for some 15 requests")
    if honours.arbitrates:
        yield Finding("conditions", "ok", "conditional puts are honoured: If-None-Match and If-Match")
    else:
        advice = "start the only daemon with --alone, or daemons with one --catalog postgresql://…, whose rows arbitrate"
        yield Finding("conditions", "warn", honours.lacking, advice)
    if honours.checksum == "crc32":
        yield Finding("checksum", "ok", "CRC32 of bodies is checked")
    else:
        yield Finding("checksum", "ok", "CRC32 is not checked: bodies carry Content-MD5, which takes 1.4 s of CPU a GiB")
    seen = f"{skew:.0f} s off the store's clock"
    if skew > CLOCK_SKEW_FAIL_S:
        yield Finding("clock", "fail", seen, "set this machine's clock: `timedatectl set-ntp true`")
    elif skew > CLOCK_SKEW_WARN_S:
        yield Finding("clock", "warn", seen, "synchronise both clocks (NTP): 15 minutes apart, every request is refused")
    else:
        yield Finding("clock", "ok", "agrees with the store's clock")


def _listed(bucket: Bucket) -> Finding:
    try:
        next(iter(bucket.pages("", delimiter="/")), None)
    except CheckpointError as error:
        return Finding("list", "fail", error.detail, error.hint)
    return Finding("list", "ok", "objects can be listed")


def _uploads(bucket: Bucket) -> Finding:
    try:
        pending = sum(1 for _ in bucket.uploads(""))
    except CheckpointError as error:
        advice = f"allow s3:ListBucketMultipartUploads, or let a lifecycle rule abort them: {_command(bucket)}"
        return Finding("uploads", "warn", f"unfinished uploads cannot be listed, so not swept: {error.detail}", advice)
    return Finding("uploads", "ok", f"unfinished uploads can be listed: {pending} now")


def _rules(bucket: Bucket, place: BucketAddress) -> Iterator[Finding]:
    """Lifecycle rules, versioning and object lock."""
    try:
        document = client.setting(bucket, "lifecycle")
    except CheckpointError as error:
        rules = None
        yield _unknown("lifecycle", error)
    else:
        rules = read_rules(document)
        yield from _lifecycle(bucket, place, rules)
    try:
        versioning = client.setting(bucket, "versioning")
    except CheckpointError as error:
        yield _unknown("versioning", error)
    else:
        yield judge_versions(place, versioning, rules)
    try:
        lock = client.setting(bucket, "object-lock")
    except CheckpointError as error:
        yield _unknown("object lock", error)
    else:
        yield judge_lock(lock)


def _lifecycle(bucket: Bucket, place: BucketAddress, rules: list[LifecycleRule]) -> Iterator[Finding]:
    whole = [rule for rule in rules if not rule.is_narrow and place_key(place).startswith(rule.prefix)]
    if any(rule.aborts_uploads for rule in whole):
        yield Finding("lifecycle", "ok", "a rule aborts unfinished uploads")
    else:
        what = "no rule aborts unfinished uploads, which a killed machine leaves until a daemon sweeps them"
        yield Finding("lifecycle", "warn", what, _command(bucket))
    for rule in rules:
        if rule.acts and (rule.prefix.startswith(place_key(place)) or place_key(place).startswith(rule.prefix)):
            what = f"rule {rule.name!r} {' and '.join(rule.acts)} objects below {rule.prefix or 'the whole bucket'!r}"
            yield Finding("lifecycle", "fail", what, "take this prefix out of the rule: checkpoints would lose their files")


def judge_versions(place: BucketAddress, document: Element | None, rules: list[LifecycleRule] | None) -> Finding:
    if document is None or answers.text(document, "Status") != "Enabled":
        return Finding("versioning", "ok", "off: what is removed is gone")
    if any(rule.removes_versions and place_key(place).startswith(rule.prefix) for rule in rules or ()):
        return Finding("versioning", "ok", "on; a rule removes old versions")
    what = "on, and no rule is known that removes old versions: removed checkpoints use space for ever"
    return Finding("versioning", "warn", what, "add a lifecycle rule with NoncurrentVersionExpiration")


def judge_lock(document: Element | None) -> Finding:
    if document is None or answers.text(document, "ObjectLockEnabled") != "Enabled":
        return Finding("object lock", "ok", "off")
    what = "on: while objects are locked, removals free nothing, and unfinished ones cannot be swept"
    return Finding("object lock", "warn", what, "use a bucket without object lock, or without a default retention")


def read_rules(document: Element | None) -> list[LifecycleRule]:
    """The enabled rules of a lifecycle configuration; none for None."""
    found = []
    for rule in [] if document is None else answers.children(document, "Rule"):
        if answers.text(rule, "Status") != "Enabled":
            continue
        inner = [rule, *answers.children(rule, "Filter")]
        inner += [both for one in inner for both in answers.children(one, "And")]
        names = {answers.local(child) for one in inner for child in one}
        acts = [word for name, word in (("Expiration", "expires"), ("Transition", "archives")) if name in names]
        if "Expiration" in names and not _expires(rule):
            acts.remove("expires")
        found.append(
            LifecycleRule(
                answers.text(rule, "ID") or "without a name",
                next((text for one in inner if (text := answers.text(one, "Prefix"))), ""),
                bool(names & {"Tag", "ObjectSizeGreaterThan", "ObjectSizeLessThan"}),
                "AbortIncompleteMultipartUpload" in names,
                tuple(acts),
                "NoncurrentVersionExpiration" in names,
            )
        )
    return found


def _expires(rule: Element) -> bool:
    """Whether it removes objects, and not only the markers of those that were deleted."""
    return any(answers.text(one, "Days") or answers.text(one, "Date") for one in answers.children(rule, "Expiration"))


def place_key(place: BucketAddress) -> str:
    """What all keys of the root begin with."""
    return f"{place.prefix}/" if place.prefix else ""


def _command(bucket: Bucket) -> str:
    return _RULE.format(bucket=bucket.address.bucket)


def _unknown(name: str, error: CheckpointError) -> Finding:
    return Finding(name, "warn", f"cannot be read: {error.detail}", error.hint)
