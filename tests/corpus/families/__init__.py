"""All cases. A module imports its libraries where they are used: this is imported in every environment."""

from __future__ import annotations

from tests.corpus.cases import Case
from tests.corpus.families import hugging_face, others, parallel, systems, torch_files, training

CASES: dict[str, Case] = {}
for _case in (*hugging_face.CASES, *torch_files.CASES, *others.CASES, *training.CASES, *systems.CASES, *parallel.CASES):
    assert _case.name not in CASES, _case.name
    CASES[_case.name] = _case
