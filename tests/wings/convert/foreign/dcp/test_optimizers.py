"""The entries of an optimizer are told apart by their paths, in both of torch's forms."""

from __future__ import annotations

from holdfast_service.wings.convert.foreign.dcp import optimizers
from holdfast_service.wings.convert.foreign.dcp.optimizers import SavedOptimizer


def test_joined_names() -> None:
    """A parameter's name ends where the model has one of that name; what follows is the kind, dots and all."""
    names = ("a.b", "a.b.state.c")
    keys = ("state.a.b.exp_avg", "state.a.b.deep.er", "state.a.b.state.c.step", "state.gone.x.step", "param_groups.a.b.lr")
    found = optimizers.parsed([((key,), f"o.{key}") for key in keys], names)
    assert isinstance(found, SavedOptimizer)
    assert {name: set(kinds) for name, kinds in found.state.items()} == {
        "a.b": {"exp_avg", "deep.er"},
        "a.b.state.c": {"step"},
        "gone.x": {"step"},
    }
    assert found.names == ("a.b",)
    assert found.groups == ({"lr": "o.param_groups.a.b.lr"},)


def test_groups_of_equal_parameters() -> None:
    """Parameters with the same hyper-parameters are one group, in the order in which they come."""
    hyper = ({"lr": 1}, {"lr": 2}, {"lr": 1})
    assert optimizers.grouped("abc", hyper) == [(["a", "c"], {"lr": 1}), (["b"], {"lr": 2})]


def test_two_forms_at_once() -> None:
    """Groups by number and by name do not come together."""
    entries = [(("param_groups", 0, "params"), "a"), (("param_groups.x.lr",), "b")]
    assert optimizers.parsed(entries, ("x",)) == "its parameter groups are stored in two forms"
    assert optimizers.parsed([(("param_groups", 1, "params"), "a")], ()) == "a parameter group lacks its parameters"
