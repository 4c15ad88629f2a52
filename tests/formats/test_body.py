"""Models that are built at their first use are the same models."""

from __future__ import annotations

import json
import subprocess
import sys

SCHEMAS = """
import json, sys
from holdfast_formats import model_building
if sys.argv[1] == "late":
    model_building.build_late()
from holdfast_formats import body, root_files
from holdfast_formats.rest import bodies, consistency, measurements, operations, retention
made = [one for one in body.Body.__subclasses__() if not one.__pydantic_generic_metadata__["parameters"]]
built = sum(one.__pydantic_complete__ for one in made)
print(json.dumps([built, {one.__name__: one.model_json_schema() for one in made}], sort_keys=True))
"""


def test_late_models_are_the_same() -> None:
    """None is built at import then, and each says of itself what it says otherwise."""
    at_once, late = (
        json.loads(subprocess.run([sys.executable, "-c", SCHEMAS, how], check=True, capture_output=True).stdout)
        for how in ("at once", "late")
    )
    assert (at_once[0], late[0]) == (len(at_once[1]), 0)
    assert at_once[1] == late[1] and len(late[1]) > 40
