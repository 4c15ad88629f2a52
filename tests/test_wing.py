"""How wings are found, and what is said of one that is absent."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_service import wing


def test_installed_wings_are_found() -> None:
    assert "notify" in {one.name for one in wing.installed()}
    assert not set(wing.absent()) & {one.name for one in wing.installed()}


def test_an_option_of_an_absent_wing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wing.require("notify", "--watch")
    monkeypatch.setattr(wing, "PACKAGE", "holdfast_service.no_wings")
    with pytest.raises(InvalidRequest, match="--watch needs the wing 'notify'"):
        wing.require("notify", "--watch")
