"""The updates in an average as a digest (its history), and the daemon's note behind an average in a slot."""

from __future__ import annotations

import msgspec

from holdfast_formats import decoding, digest
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging.average import AverageState, AverageUpdate


class AverageNote(AverageState, frozen=True):
    """The daemon's note behind an average in a slot: the checkpoint's description of it, and its history."""

    history: str = ""


def history_after(history: str, update: AverageUpdate) -> str:
    """The history of an average after this update. It covers the steps of the updates and the rule, but no elements, so
    ranks with other parts have the same one.
    """
    before = history if update.seed is None else ""
    return digest.digest(msgspec.json.encode([before, update.number, update.step, update.rule, update.seed]))


_decode_note = decoding.decoder(AverageNote)


def encode_note(state: AverageState, history: str) -> bytes:
    return msgspec.json.encode(AverageNote(**msgspec.structs.asdict(state), history=history))


def decode_note(encoded: bytes) -> tuple[AverageState, str]:
    """The state and history in a note behind an average in a slot; `InvalidRequest` for an invalid one."""
    try:
        note = _decode_note(encoded)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"this is not a daemon's record of an average: {error}") from error
    values = {name: getattr(note, name) for name in AverageState.__struct_fields__}
    return AverageState(**values), note.history
