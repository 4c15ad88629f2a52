"""An optimizer's document that an import writes is one that a torch trainer resumes from."""

from __future__ import annotations

import json

from holdfast.state.hyper_parameters import LiveGroups, chosen
from holdfast.state.optimizer_resume import read_document
from holdfast.tensors.leaves import OfferedLeaves, PartPlan, Selection
from holdfast_formats.mapping import optimizer_state


def test_hyper_parameters_are_those_of_the_document() -> None:
    """By name of the parameter, in whichever group a trainer has it; what is not given, the trainer keeps."""
    made = optimizer_state.document([(("b", "a"), {"lr": 0.5}), (("c",), {}), ((), {"lr": 9.0})])
    plan = PartPlan()
    read = read_document(json.dumps(made), "optimizer", OfferedLeaves({}, {}, {}), plan)
    assert read is not None
    live = LiveGroups("optimizer", [["a", "b"], ["c"]], [{}, {}], frozenset())
    found = chosen(live, read, plan, Selection(frozenset({"optim"})))
    assert [group.get("lr") for group in found] == [0.5, None]
    assert not plan.missing
    assert not plan.notes


def test_masters_that_an_optimizer_keeps() -> None:
    made = optimizer_state.document([(("a", "b"), {})])
    assert optimizer_state.masters_in(made) == frozenset()
    made["masters"] = {"$keys": ["master_param"], "master_param": ["a"]}
    assert optimizer_state.masters_in(made) == {"a"}
    assert optimizer_state.masters_in("no document") == frozenset()


def test_documents_with_numbers_say_so() -> None:
    made = optimizer_state.document([(("0",), {})])
    assert not optimizer_state.is_numbered(made)
    assert optimizer_state.is_numbered({**made, optimizer_state.NUMBERED: True})
    assert not optimizer_state.is_numbered({optimizer_state.NUMBERED: True})
