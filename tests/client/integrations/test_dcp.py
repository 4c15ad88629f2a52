"""torch.distributed.checkpoint with Holdfast's writer and reader: what is stored, what comes back, and what is refused."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from holdfast import Api, Checkpointer
from holdfast.integrations.dcp import HoldfastStorageReader, HoldfastStorageWriter, runs, steps
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint
from tests.daemons import RunningDaemon, running
from tests.torchruns import launch

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:.*storage_meta argument.*:UserWarning"
)
WORKER = "tests.client.integrations.dcp_worker"
_runs = itertools.count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("dcp") / "root", listen="127.0.0.1:0") as daemon:
        yield daemon
        runs.close_all()


@pytest.fixture
def run() -> str:
    return f"run-{next(_runs)}"


class Saver:
    """Saves and loads a run of the daemon."""

    def __init__(self, daemon: RunningDaemon, run: str) -> None:
        self.root, self.run = daemon.root, run

    def save(self, state: dict[str, Any], step: int, planner: Any = None, **options: Any) -> None:
        dcp.save(state, storage_writer=HoldfastStorageWriter(self.run, step=step, at=self.root, **options), planner=planner)

    def load(self, state: dict[str, Any], step: int | None = None, planner: Any = None) -> dict[str, Any]:
        dcp.load(state, storage_reader=HoldfastStorageReader(self.run, step=step, at=self.root), planner=planner)
        return state

    def refused(self, state: dict[str, Any], *words: str, **options: Any) -> None:
        """A save fails with these words in its error, and leaves nothing."""
        with pytest.raises(CheckpointException) as raised:
            self.save(state, 99, **options)
        assert all(word in str(raised.value) for word in words), str(raised.value)
        assert HoldfastStorageReader(self.run, at=self.root).step != 99

    def directory(self, step: int) -> Path:
        return self.root / naming.checkpoint_path(self.run, step)


@pytest.fixture
def saver(daemon: RunningDaemon, run: str) -> Saver:
    return Saver(daemon, run)


def trained(seed: int, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    inner = [*model[1].parameters(), *model[2].parameters()]
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": inner}], lr=0.2 * seed)
    for _ in range(steps):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    held, optim = get_state_dict(model, optimizer)
    return {"model": held, "optim": optim}


def assert_alike(one: tuple[nn.Module, torch.optim.Optimizer], two: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """Weights, buffers, moments and hyper-parameters are equal."""
    assert all(torch.equal(a, b) for a, b in zip(one[0].state_dict().values(), two[0].state_dict().values(), strict=True))
    for a, b in zip(one[0].parameters(), two[0].parameters(), strict=True):
        kept, other = one[1].state[a], two[1].state[b]
        assert kept.keys() == other.keys() and all(torch.equal(kept[key], other[key]) for key in kept)
    assert [group["lr"] for group in one[1].param_groups] == [group["lr"] for group in two[1].param_groups]


def test_ranks_save_and_other_ranks_load(tmp_path: Path) -> None:
    """FSDP2 from two ranks to three and to one; a Checkpointer reads what DCP saved, and the other way round.

    What one rank cannot save fails on both. Other kinds of parallelism are in tests/integrations/dcp.
    """
    with running(tmp_path / "root") as daemon:
        launch(2, WORKER, "save", str(daemon.root), str(tmp_path / "whole.pt"), "fsdp2")
        launch(3, WORKER, "load", str(daemon.root), str(tmp_path / "whole.pt"), "fsdp2")
        whole = torch.load(tmp_path / "whole.pt")["fsdp2"]
        with holdfast.open("fsdp2@7", root=daemon.root) as found, holdfast.open("plain@7", root=daemon.root) as plain:
            assert found.tensors["model"] == plain.tensors["model"] and found.tensors["optim"] == plain.tensors["optim"]
            for name in found.tensors["model"]:
                assert torch.equal(found.read(name, framework="torch"), whole[f".model.{name}"])
        tree = {"model": {"0.weight": torch.empty(10, 6), "3.bias": torch.empty(4)}, "loader": {"rank_0": {"seen": []}}}
        dcp.load(tree, storage_reader=HoldfastStorageReader("fsdp2", at=daemon.root))
    assert torch.equal(tree["model"]["0.weight"], whole[".model.0.weight"])
    assert tree["loader"]["rank_0"]["seen"] == [0] * 3


def test_values_come_back_as_they_are(saver: Saver) -> None:
    """Numbers, text, lists, tuples, NaN, arrays and nested tensors keep type and value; None and "" too."""
    values = {
        "step": 7,
        "name": "héllo",
        "none": None,
        "pair": (1, [2.5, float("inf")]),
        "loader": {"order": [3, 1], "deep": {"x": {"y": b"\0\xff"}, "buffer": torch.arange(5)}, "empty": []},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "list": [torch.ones(2), {"n": 1}],
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.empty(0, 3),
        "shown": torch.ones(1).expand(4),
        "one": ({"inner": torch.arange(3), "array": [np.ones(2)], "n": 1}, "x"),
    }
    saver.save(values, 1)
    blank = {"order": None, "deep": {"x": {"y": b""}, "buffer": torch.zeros(5, dtype=torch.int64)}, "empty": [1]}
    found = saver.load(
        {
            "step": 0,
            "name": "",
            "none": 1,
            "pair": (),
            "loader": blank,
            "array": np.zeros(1),
            "list": [torch.zeros(2), {"n": 0}],
            "scalar": torch.tensor(0.0, dtype=torch.float64),
            "nothing": torch.empty(0, 3),
            "shown": torch.zeros(4),
            "one": (),
        }
    )
    assert repr(found) == repr(values)
    assert found["array"].dtype == np.int16
    rebuilt: dict[str, Any] = {}
    reader = HoldfastStorageReader(saver.run, at=saver.root)
    _load_state_dict(rebuilt, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert {key: repr(value) for key, value in rebuilt.items()} == {key: repr(value) for key, value in values.items()}


def test_a_planner_that_does_not_flatten(saver: Saver) -> None:
    """Values and tensors under their own keys; a nested value is one value then."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    saver.save({"w": torch.arange(3.0), "nested": {"a": [1, {"b": 2}]}}, 1, planner=planner)
    found = saver.load({"w": torch.zeros(3), "nested": None}, planner=DefaultLoadPlanner(False, False))
    assert found["w"].tolist() == [0, 1, 2] and found["nested"] == {"a": [1, {"b": 2}]}


def test_model_and_optimizer_as_a_checkpointer_has_them(saver: Saver) -> None:
    """The same groups, names and files; each reads the other's, with equal weights, moments and hyper-parameters."""
    one = trained(1)
    saver.save(state_dict(*one), 1, assets={"config.json": {"model_type": "mine"}})
    stored = load_file(saver.directory(1) / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in one[0].state_dict().items())
    assert (saver.directory(1) / "config.json").is_file()
    two = trained(2, 0)
    with Checkpointer(saver.run, {"model": two[0], "optim": two[1]}, at=saver.root) as checkpointer:
        assert checkpointer.restore() == 1
        assert_alike(one, two)
        two[1].step()
        two[1].param_groups[1]["lr"] = 0.7
        checkpointer.save(2, wait="durable")
        three = trained(3)
        held = saver.load(state_dict(*three))
        set_state_dict(*three, model_state_dict=held["model"], optim_state_dict=held["optim"])
        assert_alike(two, three)


def test_tied_weights_that_a_checkpointer_stored_once(saver: Saver) -> None:
    """DCP finds both names."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    with Checkpointer(saver.run, {"model": model}, at=saver.root) as checkpointer:
        checkpointer.save(1, wait="durable")
    found = saver.load({"model": {"a.weight": torch.zeros(3, 3), "b.weight": torch.zeros(3, 3)}})["model"]
    assert torch.equal(found["b.weight"], model["a"].weight) and torch.equal(found["a.weight"], model["a"].weight)


def test_other_optimizers_come_back_too(saver: Saver) -> None:
    """An optimizer's own state dict, by number, and two optimizers with the same parameter names."""
    one, two = trained(1), trained(2)
    state = {"optim": one[1].state_dict()}
    saver.save(state, 1)
    other = {"optim": trained(3)[1].state_dict()}
    saver.load(other)
    assert all(
        torch.equal(a[key], b[key])
        for a, b in zip(state["optim"]["state"].values(), other["optim"]["state"].values(), strict=True)
        for key in a
    )
    both = {"optim_g": get_state_dict(*one)[1], "optim_d": get_state_dict(*two)[1]}
    saver.save(both, 2)
    found = {"optim_g": get_state_dict(*trained(3))[1], "optim_d": get_state_dict(*trained(4))[1]}
    saver.load(found)
    assert repr(found) == repr(both)


def test_an_optimizer_without_its_state_is_refused(saver: Saver) -> None:
    """`state_dict()` of an optimizer that has not stepped asks for no moments: they are named, and not dropped."""
    model, optimizer = trained(1)
    saver.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, 1)
    fresh, unstepped = trained(2, steps=0)
    asked = {"model": fresh.state_dict(), "optim": unstepped.state_dict()}
    with pytest.raises(CheckpointException, match=r"requests none of the tensors that .*exp_avg"):
        saver.load(asked, 1)
    saver.load({"model": fresh.state_dict()}, 1)
    assert torch.equal(next(fresh.parameters()), next(model.parameters()))


def test_a_part_of_a_checkpoint_and_another_dtype(saver: Saver) -> None:
    """Only the model is loaded, and DCP's conversion of dtypes holds."""
    model, optimizer = trained(1)
    saver.save(state_dict(model, optimizer), 1)
    found = saver.load({"model": {"0.weight": torch.zeros(8, 4, dtype=torch.bfloat16), "2.bias": torch.zeros(2)}})["model"]
    assert torch.equal(found["0.weight"], model[0].weight.bfloat16()) and torch.equal(found["2.bias"], model[2].bias)
    with pytest.raises(CheckpointException, match="Missing key"):
        saver.load({"model": {"nobody": torch.zeros(1)}})
    assert saver.load({"new": 1}, planner=DefaultLoadPlanner(allow_partial_load=True)) == {"new": 1}


def test_one_writer_for_several_steps(saver: Saver) -> None:
    """checkpoint_id names the step; a step that was saved by this launch is replaced."""
    writer = HoldfastStorageWriter(saver.run, at=saver.root)
    for step, given in ((1, 1), (2, "2"), (3, "a/b/step-00003"), (4, Path("ckpt_4")), (4, "4/")):
        dcp.save({"n": step * 10}, storage_writer=writer, checkpoint_id=given)
    reader = HoldfastStorageReader(saver.run, at=saver.root)
    for step in (1, 2, 3, 4):
        state = {"n": 0}
        dcp.load(state, storage_reader=reader, checkpoint_id=f"step-{step}")
        assert state == {"n": step * 10}
    saver.save({"n": 5}, 4)
    assert saver.load({"n": 0}) == {"n": 5}
    for wrong in ("abc", "5x", True, -1, 1.5, b"5", ""):
        with pytest.raises(InvalidRequest):
            steps.of_id(wrong)
    with pytest.raises(CheckpointException, match="step of this save is unknown"):
        dcp.save({"n": 1}, storage_writer=HoldfastStorageWriter(saver.run, at=saver.root))


def test_plans_that_a_planner_keeps(saver: Saver) -> None:
    """With plan caching, later saves store that moment's values and tensors, and new entries."""
    for step in (1, 2, 3):
        state = {"model": {"w": torch.full((3,), float(step))}, "lr": step / 10, **({"more": 1} if step == 3 else {})}
        saver.save(state, step, planner=DefaultSavePlanner(enable_plan_caching=True))
    for step in (1, 2, 3):
        found = saver.load({"model": {"w": torch.zeros(3)}, "lr": 0}, step)
        assert found["lr"] == step / 10 and found["model"]["w"].tolist() == [step] * 3
    assert saver.load({"more": 0}) == {"more": 1}


def test_what_a_plan_of_another_writer_says(saver: Saver, tmp_path: Path) -> None:
    """A plan that was kept from a save to files is refused by name."""

    class Cached(DefaultSavePlanner):
        def __init__(self) -> None:
            super().__init__(enable_plan_caching=True)

    state = {"w": torch.ones(2)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "files"), planner=Cached())
    saver.refused(state, "plan was made for another storage writer", planner=Cached())


def test_asynchronous_saves(saver: Saver) -> None:
    """The state of the moment is saved, whatever becomes of it afterwards, and the future waits for the commit."""
    weight = torch.ones(4)
    future = dcp.async_save({"w": weight}, storage_writer=HoldfastStorageWriter(saver.run, step=1, at=saver.root))
    weight.zero_()
    future.result()
    assert saver.load({"w": torch.zeros(4)})["w"].tolist() == [1] * 4
    failing = dcp.async_save({"w": {1, 2}, "x": iter(())}, storage_writer=HoldfastStorageWriter("x", step=1, at=saver.root))
    with pytest.raises(CheckpointException, match="iterator"):
        failing.result()


def test_a_save_in_a_thread_leaves_the_random_streams_alone(saver: Saver) -> None:
    """What the training draws while a thread saves is what it draws without (a save put the streams back)."""
    torch.manual_seed(5)
    drawn = []
    for step in (1, 2, 3):
        writer = HoldfastStorageWriter(saver.run, step=step, at=saver.root)
        future = dcp.async_save({"model": {str(n): torch.zeros(9) for n in range(50)}}, storage_writer=writer)
        while not future.done():
            drawn.append(torch.rand(1).item())
        future.result()
    torch.manual_seed(5)
    assert drawn == [torch.rand(1).item() for _ in drawn]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": object()}}, ("a.b", "object", "cannot be stored")),
        ({"model": {"x": BytesIO(b"1")}}, ("model.x", "BytesIO")),
        ({"f": print}, ("f:", "builtin_function_or_method")),
        ({"optim": {"state": {}, "param_groups": [{"params": ["w"], "fn": len}]}}, ("fn", "builtin_function")),
        ({"s": torch.eye(2).to_sparse()}, ("sparse",)),
        ({"q": torch.ones(2, dtype=torch.complex128)}, ("q", "complex128")),
        ({"ranks": 1}, ("ranks", "reserved")),
        ({"a": {"x": [torch.ones(1), 1]}, "a/x/0": torch.ones(1)}, ("a/x/0", "name")),
        ({"meta": torch.empty(2, device="meta")}, ("meta",)),
    ],
)
def test_what_is_refused_by_name(saver: Saver, state: dict[str, Any], words: tuple[str, ...]) -> None:
    """Before anything is staged: the run has no checkpoint and the next save is made."""
    saver.refused(state, *words)
    saver.save({"w": torch.ones(1)}, 1)
    assert saver.load({"w": torch.zeros(1)})["w"].tolist() == [1]


def test_a_planner_that_only_pickles_is_refused(saver: Saver) -> None:
    """Nothing is stored pickled; a planner's tensor that does not fit its plan is refused too."""

    class Pickling(DefaultSavePlanner):
        lookup_object = None

        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            del self.state_dict
            return plan

    class Cutting(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item)[1:]

    saver.refused({"n": 1}, "n: Pickling provides this value only as a pickle", planner=Pickling())
    saver.refused({"w": torch.ones(3)}, "w: the planner gives a tensor of shape [2]", planner=Cutting())


def test_a_planner_that_converts_is_obeyed(saver: Saver) -> None:
    """The stored dtype is that of the planner's tensor."""

    class Half(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item).half()

    saver.save({"model": {"w": torch.full((3,), 1.5)}}, 1, planner=Half())
    assert load_file(saver.directory(1) / "model.safetensors")["w"].dtype == torch.float16


def test_names_and_places_are_checked_at_once(tmp_path: Path, daemon: RunningDaemon) -> None:
    """The constructors refuse by name what could never be."""
    for wrong in ({"run": "../x"}, {"run": "r", "step": -1}, {"run": "r", "existing": "maybe"}, {"run": "r", "at": 5}):
        with pytest.raises(InvalidRequest):
            HoldfastStorageWriter(**wrong)
    with pytest.raises(InvalidRequest, match="socket"):
        HoldfastStorageReader("r", at=daemon.socket)
    assert HoldfastStorageReader("none", at=tmp_path / "nowhere").step == 0
    with pytest.raises((CheckpointException, NoSuchCheckpoint), match="has no checkpoint"):
        dcp.load({"w": torch.zeros(1)}, storage_reader=HoldfastStorageReader("none", at=daemon.root))


def test_going_back_and_a_launch_that_loaded_nothing(saver: Saver) -> None:
    """After the load of an older step the steps behind it are set aside. A new launch that loaded nothing is refused."""
    for step in (1, 2, 3):
        saver.save({"n": step}, step)
    assert saver.load({"n": 0}, 1) == {"n": 1}
    saver.save({"n": 20}, 2)
    assert HoldfastStorageReader(saver.run, at=saver.root).step == 2 and saver.load({"n": 0}) == {"n": 20}
    runs.close_all()  # as another process
    with pytest.raises(CheckpointException, match="already"):
        saver.save({"n": 0}, 2)
    saver.save({"n": 21}, 2, existing="replace")
    assert saver.load({"n": 0}) == {"n": 21}


def test_a_save_after_one_that_failed(saver: Saver, daemon: RunningDaemon) -> None:
    """It goes on from the last step that this training has saved: it is not refused, and leaves nothing behind."""
    with httpx.Client(base_url=daemon.url) as http:

        def limit(quota: int | None) -> None:
            got = http.get(f"/v1/runs/{saver.run}/policy")
            policy, match = {**got.json(), "quota_bytes": quota}, {"If-Match": got.headers["etag"]}
            http.put(f"/v1/runs/{saver.run}/policy", json=policy, headers=match).raise_for_status()

        saver.save({"n": torch.ones(2)}, 1)
        for step in (2, 4):
            saver.save({"n": torch.ones(2)}, step)
            limit(1)
            saver.refused({"n": torch.ones(2)}, "quota")
            limit(None)
            saver.save({"n": torch.ones(2)}, step + 1)
            saver.load({"n": torch.ones(2)}, step + 1)
    with Api(daemon.url) as api:
        assert sorted(made.step for made in api.checkpoints(saver.run) if made.state != "abandoned") == [1, 2, 3, 4, 5]


def test_a_writer_travels_to_another_process(saver: Saver) -> None:
    """It takes along what it needs there: run, place, step, and the step that this process has loaded."""
    saver.save({"n": 1}, 1)
    saver.load({"n": 0})
    writer = pickle.dumps(HoldfastStorageWriter(saver.run, step=1, at=saver.root))
    runs.close_all()  # as in the other process
    dcp.save({"n": 2}, storage_writer=pickle.loads(writer))
    assert saver.load({"n": 0}) == {"n": 2}


def test_bytes_that_changed_on_the_disk(saver: Saver) -> None:
    """A flipped bit is an error that names the file; a newest step without its manifest gives way to the one before."""
    for step in (1, 2):
        saver.save({"model": {"w": torch.full((64,), float(step))}}, step)
    runs.close_all()
    file = saver.directory(2) / "model.safetensors"
    octets = bytearray(file.read_bytes())
    octets[-3] ^= 1
    file.write_bytes(octets)
    weight = torch.full((64,), 9.0)
    with pytest.raises(CheckpointException, match=r"model\.safetensors"):
        saver.load({"model": {"w": weight}})
    assert not any(value in weight for value in (1.0, 2.0)) or weight[-1] == 0
    (saver.directory(2) / naming.MANIFEST).write_bytes(b"{")
    assert saver.load({"model": {"w": weight}})["model"]["w"].tolist() == [1] * 64


def test_over_http(saver: Saver, daemon: RunningDaemon) -> None:
    """A machine that sees no directory loads from the daemon's address."""
    saver.save({"model": {"w": torch.arange(4.0)}, "n": 3}, 1)
    state = {"model": {"w": torch.zeros(4)}, "n": 0}
    reader = HoldfastStorageReader(saver.run, at=daemon.url)
    assert reader.step == 1
    dcp.load(state, storage_reader=reader)
    assert state["model"]["w"].tolist() == [0, 1, 2, 3] and state["n"] == 3
