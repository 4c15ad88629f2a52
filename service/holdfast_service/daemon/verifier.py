"""Reads a checkpoint back and proves every byte against its manifest (I7), with bounded memory.

It reads what is stored and not what a cache still holds, where the tier can tell the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from holdfast_formats import manifest, naming, proof
from holdfast_formats.errors import NotCommitted
from holdfast_formats.manifest import Manifest, TensorEntry
from holdfast_formats.proof import Piece
from holdfast_service.storage import Tier

from .priority import give_way
from .windows import ALIGNMENT_MAX, WINDOW_BYTES, Windows

WORKERS = 2

_windows = Windows(WORKERS)


def verify(tier: Tier, directory: str) -> Manifest:
    """Check COMMIT, manifest, every header, every extent and every small file under `directory`; return the manifest.

    Raises `NotCommitted`, `CorruptManifest` or `CorruptExtent`, naming file, tensor and byte range of the first damage.
    """
    if tier.size(f"{directory}/{naming.COMMIT}") is None:
        raise NotCommitted(f"{directory} has no {naming.COMMIT}")
    made = manifest.decode(tier.read(f"{directory}/{naming.MANIFEST}"), tier.read(f"{directory}/{naming.COMMIT}"))
    for file in made.files:
        proof.check_size(made, file.name, tier.size(f"{directory}/{file.name}"))
    headers = proof.tensors_by_file(made)
    batches = proof.batches(piece for listed in proof.pieces(made).values() for piece in listed)
    with ThreadPoolExecutor(WORKERS, "holdfast-verify", initializer=give_way) as pool:
        jobs = [pool.submit(_prove, tier, directory, made, batch, headers) for batch in batches]
        try:
            for job in jobs:
                job.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return made


def _prove(
    tier: Tier, directory: str, made: Manifest, batch: Sequence[Piece], headers: Mapping[str, Mapping[str, TensorEntry]]
) -> None:
    begin = batch[0].start - batch[0].start % ALIGNMENT_MAX
    room = batch[-1].stop - begin + -batch[-1].stop % ALIGNMENT_MAX
    with _windows.taken() as window:
        buffer = window if room <= WINDOW_BYTES else np.empty(room, np.uint8)  # a large header or asset
        read = tier.read_stored(f"{directory}/{batch[0].file}", begin, buffer[:room])
        for piece in batch:
            data = buffer[piece.start - begin : max(min(piece.stop - begin, read), piece.start - begin)]
            proof.check(piece, data)
            if piece.start == 0 and piece.file in headers:
                file = made.file(piece.file)
                assert file is not None
                proof.check_header(file, headers[piece.file], data.tobytes())
