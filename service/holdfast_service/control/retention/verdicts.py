"""What the policy of a run says about its checkpoints as they are now. Nothing is changed here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import NewestHealthy, NewestVerified
from holdfast_formats.lineage import line
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import Preview, RetentionPolicy, Verdict
from holdfast_service.control.catalog.catalog import Catalog, CommitProof
from holdfast_service.control.checkpoints import roots, shared_files
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.checkpoints.run_files import RunFile, RunFiles
from holdfast_service.control.checkpoints.tiers import Tiers
from holdfast_service.control.retention import protecting_links
from holdfast_service.control.retention.policy import Candidate, Decision, decide, foresee, newest_of
from holdfast_service.control.retention.proven_decisions import UNKNOWN, ProvenDecisions, RemovalProbe
from holdfast_service.control.retention.replaced_checkpoints import ReplacedCheckpoints
from holdfast_service.control.retention.thin_policy import ThinDecision, ThinEstimate, could_save, decide_thinning, older_of
from holdfast_service.storage import Store

log = logging.getLogger(__name__)

_READ = "it is being read"
_PINNED = "it is pinned"
_FRESH = "it is being replaced"


class Verdicts:
    """The verdicts on all runs of one root."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        store: Store,
        catalog: Catalog,
        files: RunFiles,
        readers: Readers,
        proofs: RemovalProbe,
        replaced: ReplacedCheckpoints,
        tiers: Tiers,
    ) -> None:
        self._store, self._tiers = store, tiers
        self._catalog, self._files, self._readers = catalog, files, readers
        self._proofs, self._replaced = proofs, replaced

    def preview(self, run: str, policy: RetentionPolicy | None = None, step: int | None = None) -> Preview:
        """What the policy in force, or this one, would do now; nothing is changed. With `step`, only its verdict is
        included; all are judged, because verdicts depend on each other. Raises `NoSuchRun`.
        """
        listed: dict[int, bodies.CheckpointInfo] = {}
        file, candidates = self.looked_at(run, listed)
        chosen = policy or file.in_force
        candidates, decisions = self.proven(run, candidates, chosen)
        thinning = decide_thinning(candidates, decisions, chosen)
        listed = {candidate.step: listed[candidate.step] for candidate in candidates}  # what is there
        sound = {candidate.step for candidate in candidates if candidate.verified}
        kept = self._occupied(run, {decision.step: listed[decision.step] for decision in decisions if decision.keep})
        foresight = ThinEstimate(listed.values())
        after = {at: _bytes_after(listed[at], decision, foresight) for at, decision in thinning.items()}
        freed = {at: listed[at].bytes - (size or 0) for at, size in after.items()}
        return Preview(
            policy=chosen,
            verdicts=[
                _verdict(
                    decision,
                    listed[decision.step].model_copy(update={"verified": decision.step in sound}),
                    file,
                    thinning[decision.step],
                    after[decision.step],
                )
                for decision in decisions
                if step in (None, decision.step)
            ],
            bytes_kept=kept,
            bytes_removed=self._occupied(run, listed) - kept,
            bytes_thinned=sum(freed[at] for at, decision in thinning.items() if decision.thin),
            bytes_compacted=sum(freed[at] for at, decision in thinning.items() if decision.small is not None),
            could_save=could_save([listed[one.step] for one in older_of(candidates, decisions)], foresight),
            bytes_saved=sum(before.bytes - c.bytes for c in listed.values() if (before := c.thinned or c.compacted)),
        )

    def _occupied(self, run: str, checkpoints: Mapping[int, bodies.CheckpointInfo]) -> int:
        """The bytes of these checkpoints, those of files that several of them have once."""
        shares = any(one.shared_bytes for one in checkpoints.values())
        sizes = {step: one.bytes for step, one in checkpoints.items()}
        shared = shared_files.shared_bytes(self._store, run, sizes) if shares else {}
        return sum(one.bytes - shared.get(step, 0) for step, one in checkpoints.items())

    def looked_at(
        self, run: str, listed: dict[int, bodies.CheckpointInfo] | None = None, *, for_room: bool = False
    ) -> tuple[RunFile, list[Candidate]]:
        """The run's file, and its checkpoints as the rules see them; their catalog entries are added to `listed`. Without
        room for a save, `for_room`, none is kept because it has yet to be copied to a tier.
        """
        file, read = self._files.read(run), self._readers.held(run)
        fresh = self._replaced.fresh(run)  # before the catalog is read
        busy = dict.fromkeys(read, _READ) | dict.fromkeys(fresh, _FRESH)
        awaited = {} if for_room else self._tiers.awaited(run)
        linked = protecting_links.standing(file, run)
        for path in linked.unseen:
            log.warning("not removing checkpoints of %s: cannot read %s, which may hold links to them", run, path)
        listed_now, known = roots.all_checkpoints(self._catalog, run), self._catalog.proofs(run)
        if listed is not None:
            listed |= {c.step: c for c in listed_now}
        return file, [
            _candidate(
                c, known.get(c.step, UNKNOWN), file, busy.get(c.step), _others(linked.holds(c.step), awaited.get(c.step))
            )
            for c in listed_now
        ]

    def proven(self, run: str, candidates: Sequence[Candidate], policy: RetentionPolicy) -> ProvenDecisions:
        """This policy's decisions about the existing candidates, as of the newest commit. Storage is looked at only where it
        removes or thins any of the listed ones.
        """
        decisions = decide(candidates, policy, _newest_commit(candidates))
        if policy.keep_full is None and policy.optim is None and all(decision.keep for decision in decisions):
            return ProvenDecisions(list(candidates), decisions)
        return self._proofs.decided(run, candidates, lambda now: decide(now, policy, _newest_commit(now)))

    def keeps(self, elsewhere: Manifest, abandoned: bool) -> bool:
        """Whether the policy in force keeps a checkpoint that is elsewhere now, once it is in the root."""
        file, candidates = self.looked_at(elsewhere.run)
        others = [candidate for candidate in candidates if candidate.step != elsewhere.step]
        marks = [*file.labels_of(elsewhere.step), *([_PINNED] if elsewhere.step in file.pins else [])]
        created, groups = _newest_commit(others), frozenset(elsewhere.groups)
        gone = frozenset(elsewhere.thinned.groups) if elsewhere.thinned is not None else frozenset[str]()
        coming = Candidate(
            elsewhere.step, created, holds=tuple(marks), groups=groups, line=line(elsewhere.rewinds), gone=gone
        )
        decisions = decide([*others, coming._replace(abandoned=abandoned)], file.in_force, created)
        return all(decision.keep for decision in decisions if decision.step == elsewhere.step)

    def for_room(self, run: str, incoming: Candidate) -> dict[int, list[str]]:
        """The steps to remove for a save that does not fit, the first one first, with the reasons."""
        file, candidates = self.looked_at(run, for_room=True)
        steps, awaited = self.foreseen(run, candidates, incoming, file.in_force), self._tiers.awaited(run)
        why = f"to make room for step {incoming.step}"
        return {step: [why, *filter(None, [awaited.get(step)])] for step in sorted(steps, key=lambda step: step in awaited)}

    def foreseen(self, run: str, candidates: Sequence[Candidate], incoming: Candidate, policy: RetentionPolicy) -> list[int]:
        """The result of `foresee` for the existing candidates."""
        gone: list[int] = []

        def decided(now: Sequence[Candidate]) -> list[Decision]:
            coming = incoming._replace(created=_newest_commit(now))
            gone[:] = foresee(now, coming, policy, coming.created)
            return [Decision(c.step, c.step not in gone, ()) for c in now]

        self._proofs.decided(run, candidates, decided)
        return gone

    def refuse_newest(self, checkpoint: bodies.CheckpointInfo, newest: bool, healthy: bool) -> None:
        """Refuse to remove checkpoints that no policy removes, unless they are named: `NewestVerified`, `NewestHealthy`."""
        groups = ", ".join(checkpoint.groups)
        which = f"{checkpoint.run}@{checkpoint.step} is the newest checkpoint of its run with the groups {groups} that is"
        if checkpoint.abandoned:
            return
        _, candidates = self.looked_at(checkpoint.run)
        # What would be the newest without this one is looked at: where it is not there, this one is.
        standing, _ = self._proofs.decided(checkpoint.run, candidates, lambda now: _stays_for(checkpoint, now))
        newest_verified, newest_healthy = newest_of(standing, checkpoint.groups)
        if checkpoint.step == newest_verified:
            if not newest:
                hint = "to remove it anyway, pass --force newest-verified"
                raise NewestVerified(f"{which} known to be sound", hint=hint)
        elif checkpoint.step == newest_healthy and not healthy:
            hint = "newer checkpoints have new NaN or infinities; to remove it anyway, pass --force newest-healthy"
            raise NewestHealthy(f"{which} verified and healthy", hint=hint)

    def readers_left_s(self, run: str, candidates: Sequence[Candidate], file: RunFile) -> float | None:
        """In how many seconds the first checkpoint that only readers keep is free; None if there is no such one."""
        if not any(_READ in c.holds for c in candidates):
            return None
        free = [c._replace(holds=tuple(h for h in c.holds if h != _READ)) for c in candidates]
        decisions = decide(free, file.in_force, _newest_commit(free))
        thinned = {d.step for d in decide_thinning(free, decisions, file.in_force).values() if d.acts}
        gone = {d.step for d in decisions if not d.keep} | thinned
        waits = [left for step, left in self._readers.held(run).items() if step in gone]
        return max(min(waits), 0.1) if waits else None


def _others(links: Sequence[str], awaited: str | None) -> Sequence[str]:
    return links if awaited is None else (*links, awaited)


def _candidate(
    c: bodies.CheckpointInfo, known: CommitProof, file: RunFile, busy: str | None, linked: Sequence[str]
) -> Candidate:
    pin = [_PINNED] if c.step in file.pins else []
    labels = [f"it has the label {label}" for label in file.labels_of(c.step)]
    before = file.policy is None and file.keep_last is not None and c.attempt < file.keep_last_since
    kept = [f"it was saved before the launch that first asked for keep_last={file.keep_last}"] if before else []
    holds = (*pin, *labels, *linked, *kept, *([busy] if busy else []))
    groups = frozenset(c.groups)
    verified = c.verified and busy != _FRESH  # what was verified was the one before
    gone = frozenset(c.thinned.groups) if c.thinned is not None else frozenset[str]()
    judged = Candidate(
        c.step, known.seen_s, verified, c.metrics, holds, c.healthy, groups, line(c.rewinds), c.abandoned, gone
    )
    small = frozenset(c.small_bytes or ())
    return judged._replace(small=small, compact=c.compacted is not None, proven=known.proven)


def _newest_commit(candidates: Sequence[Candidate]) -> float:
    """The end of ages, in the run's time: a run without new saves does not age."""
    return max((c.created for c in candidates), default=0.0)


def _stays_for(checkpoint: bodies.CheckpointInfo, candidates: Sequence[Candidate]) -> list[Decision]:
    """The newest ones with the groups of this one, besides it, and this one itself."""
    newest = newest_of([c for c in candidates if c.step != checkpoint.step], checkpoint.groups)
    return [Decision(c.step, c.step in (checkpoint.step, *newest), ()) for c in candidates]


def _verdict(
    decision: Decision, listed: bodies.CheckpointInfo, file: RunFile, thinning: ThinDecision, after: int | None
) -> Verdict:
    return Verdict(
        step=decision.step,
        keep=decision.keep,
        reasons=list(decision.reasons),
        verified=listed.verified,
        pinned=decision.step in file.pins,
        labels=list(file.labels_of(decision.step)),
        created=listed.created,
        bytes=listed.bytes,
        thin=thinning.thin,
        thinned=listed.thinned is not None,
        thin_reason=thinning.why,
        compact=thinning.small is not None,
        compacted=listed.compacted is not None,
        bytes_after=after,
    )


def _bytes_after(listed: bodies.CheckpointInfo, thinning: ThinDecision, foresight: ThinEstimate) -> int | None:
    if thinning.small is not None:
        return foresight.bytes_after(listed, thinning.small)
    return (listed.thin_bytes or listed.bytes) if thinning.thin else None
