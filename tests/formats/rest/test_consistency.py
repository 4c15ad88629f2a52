"""consistency: the report of a look at catalog and directories."""

from __future__ import annotations

from holdfast_formats.rest.consistency import CatalogCheck, Contradiction


def test_a_check_is_sound_without_contradictions() -> None:
    """Its number counts, not the items that are shown."""
    item = Contradiction(kind="not-listed", run="run", step=5, text="run@5 is committed but not listed")
    facts = {"catalog": "sqlite:///x", "runs": 1, "checkpoints": 1, "manifests_read": 0, "thorough": False}
    assert CatalogCheck(**facts, count=0, items=[]).sound
    found = CatalogCheck(**facts, count=2, items=[item])
    assert not found.sound
    assert CatalogCheck.model_validate_json(found.model_dump_json()) == found
