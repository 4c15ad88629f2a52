"""The stored form of a sealed round: the parts in one body, and the declarations that they name.

Every node reads it once per round. Declarations repeat from step to step, so they are cached.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import zstandard
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from holdfast_formats.errors import InvalidRequest, RoundAborted
from holdfast_formats.staging import joined
from holdfast_formats.staging.joined import JoinedPart
from holdfast_formats.staging.joint import JointPart, JointRound
from holdfast_service.control.database.cluster_schema import DeclarationRow, JointRoundRow
from holdfast_service.control.database.database import Database
from holdfast_service.wings.cluster.membership import now

BODY_BYTES_MAX = 2**30  # of a declaration or a part's values, uncompressed
DECLARATIONS_KEPT = 64
SEALED_KEPT = 4  # rounds that go on at once are few
TOGETHER_MIN = 8  # so many declarations, and more, are kept together too
TOGETHER_BYTES_MAX = BODY_BYTES_MAX - 2**20
WINDOW_LOG = 27  # zstd looks back for what is alike so far, 128 MiB
LOST = "the catalog has lost the save; it may have been restored from a backup"


class _Brought(NamedTuple):
    state: str
    created: str
    world: int
    parts: tuple[JoinedPart, ...]


class RoundBodies:
    """Writes bodies for the sealing node, and reads them for all nodes. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._declarations: OrderedDict[str, bytes] = OrderedDict()
        self._sealed: OrderedDict[int, _Brought] = OrderedDict()

    def join(self, session: Session, parts: Sequence[JoinedPart]) -> bytes:
        """Join all parts into one body; their declarations are joined too."""
        self._keep_together(session, {part.declaration for part in parts})
        return _pack(joined.encode_parts(parts))

    def _keep_together(self, session: Session, digests: Collection[str]) -> None:
        """Join declarations that all nodes read into one body, once for the nodes of a launch."""
        name = joined.name_of(digests)
        if len(digests) < TOGETHER_MIN or session.get(DeclarationRow, name) is not None:
            return
        rows = session.execute(select(DeclarationRow.digest, DeclarationRow.body).where(DeclarationRow.digest.in_(digests)))
        bodies = [unpack(body) for _, body in sorted((digest, body) for digest, body in rows)]
        if sum(map(len, bodies)) > TOGETHER_BYTES_MAX:
            return
        values = {"digest": name, "body": _pack(joined.encode_declarations(bodies)), "since": now()}
        session.execute(insert(DeclarationRow).values(values).on_conflict_do_nothing())

    def sealed(self, round_id: int) -> JointRound:
        """A sealed round with its parts, as of sealing: before any share was written."""
        state, created, world, brought = made = self._brought(round_id)
        with self._lock:
            self._sealed[round_id] = made
            while len(self._sealed) > SEALED_KEPT:
                self._sealed.popitem(last=False)
        parts = tuple(JointPart(one.node, one.ranks, True, True, one.url, False) for one in brought)
        return JointRound(round_id, state, created, world, parts, None)

    def parts(self, round_id: int) -> list[tuple[str, bytes, bytes]]:
        """For each part of a sealed round: its declaration's digest, the declaration, and its ranks' other values."""
        with self._lock:  # taken once: a catalog that was restored may give the number to another round
            seen = self._sealed.pop(round_id, None)
        brought = (seen or self._brought(round_id)).parts
        wanted = {one.declaration for one in brought}
        with self._lock:
            known = {digest: self._declarations[digest] for digest in wanted & self._declarations.keys()}
        if wanted - known.keys():
            known |= self._read_declarations(wanted, wanted - known.keys())
        with self._lock:
            for digest in wanted:  # those of this round are the newest
                self._declarations[digest] = known[digest]
                self._declarations.move_to_end(digest)
            while len(self._declarations) > max(DECLARATIONS_KEPT, len(wanted)):
                self._declarations.popitem(last=False)
        return [(one.declaration, known[one.declaration], one.said) for one in brought]

    def _brought(self, round_id: int) -> _Brought:
        row = JointRoundRow
        wanted = select(row.state, row.created, row.world, row.joined).where(row.id == round_id)
        with self._database.plain() as connection:
            row_found = connection.execute(wanted).one_or_none()
        if row_found is None:
            raise RoundAborted(LOST)
        if row_found.joined is None:
            raise RoundAborted(f"the round is {row_found.state}, so its parts are not final")
        return _Brought(row_found.state, row_found.created, row_found.world, joined.decode_parts(unpack(row_found.joined)))

    def _read_declarations(self, wanted: Collection[str], unknown: Collection[str]) -> dict[str, bytes]:
        """Read a joined body if it exists and many are unknown; read what is still missing one by one."""
        bodies: dict[str, bytes] = {}
        with self._database.plain() as connection:
            if len(unknown) >= TOGETHER_MIN:
                together = select(DeclarationRow.body).where(DeclarationRow.digest == joined.name_of(wanted))
                body = connection.scalar(together)
                bodies |= {} if body is None else joined.decode_declarations(unpack(body))
            left = set(unknown) - bodies.keys()
            alone = select(DeclarationRow.digest, DeclarationRow.body).where(DeclarationRow.digest.in_(left))
            for digest, body in connection.execute(alone) if left else ():
                bodies[digest] = unpack(body)
                if hashlib.sha256(bodies[digest]).hexdigest() != digest:
                    raise InvalidRequest("the declaration in the catalog does not match its digest")
        if set(unknown) - bodies.keys():
            raise RoundAborted(LOST)
        return bodies


def _pack(body: bytes) -> bytes:
    """Compressed with a window that spans nodes' similar parts."""
    ways = zstandard.ZstdCompressionParameters.from_level(3, window_log=WINDOW_LOG, enable_ldm=True, write_checksum=True)
    return zstandard.ZstdCompressor(compression_params=ways).compress(body)


def unpack(packed: bytes) -> bytes:
    """The decompressed body; `InvalidRequest` for other bytes."""
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=2**WINDOW_LOG)
        return reader.decompress(packed, max_output_size=BODY_BYTES_MAX)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"cannot read a save's entry in the catalog: {error}") from error
