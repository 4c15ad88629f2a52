"""What `save()` takes as metrics: numbers; none of them ends the training."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from holdfast.stage.save_request import check_metrics
from holdfast_formats.errors import InvalidRequest


def test_numbers_of_every_type_become_floats() -> None:
    """Those beyond what a float holds become infinite; NaN and infinities stay."""
    given = {"nan": math.nan, "inf": -math.inf, "int": 10**400, "fraction": -Fraction(10**400), "f4": np.float64(2.0)}
    found = check_metrics({**given, "largest": 10**308, "least": 5e-324})
    assert math.isnan(found.pop("nan"))
    assert found == {
        "inf": -math.inf,
        "int": math.inf,
        "fraction": -math.inf,
        "f4": 2.0,
        "largest": 1e308,
        "least": 5e-324,
    }


@pytest.mark.parametrize("value", [True, "1", None, [1.0]])
def test_what_is_no_number_is_refused_by_name(value: object) -> None:
    """Before anything is copied."""
    with pytest.raises(InvalidRequest, match="loss"):
        check_metrics({"loss": value})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("metrics", "told"), [([("loss", 1.0)], "mapping"), ("loss", "mapping"), ({1: 1.0}, "name of a metric")]
)
def test_what_is_no_mapping_of_names_is_refused_as_that(metrics: object, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        check_metrics(metrics)  # type: ignore[arg-type]
