"""Ranks that cannot see their daemon's socket: the same saves, over links that break, stall and crawl."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import Api, Checkpointer, Fragment
from holdfast.link.own_daemon import socket_of
from holdfast.remote import uploader
from holdfast.remote.http_link import RemoteLink
from holdfast.stage.slots import Slots
from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    ArenaFull,
    DaemonGone,
    GenerationDropped,
    InvalidRequest,
    RoundAborted,
    StaleAttempt,
)
from holdfast_formats.rest import bodies
from holdfast_formats.staging import wire
from holdfast_formats.staging.messages import Policy
from tests.checkpoints import build_root
from tests.daemons import RunningDaemon, hide, running, wait_until
from tests.forked import Forked
from tests.proxies import PIECE_BYTES, Proxy, proxied
from tests.serving import served

MIB = 2**20
_runs = itertools.count()


@contextmanager
def far_daemon(root: Path, *flags: str, listen: str = "127.0.0.1:0", closed: bool = False) -> Iterator[RunningDaemon]:
    with running(root, *flags, listen=listen, closed=closed) as daemon:
        hide(daemon)
        yield daemon


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One daemon without a socket for all tests of this file; each uses a run of its own."""
    with far_daemon(tmp_path_factory.mktemp("remote") / "root") as daemon:
        yield daemon


@pytest.fixture
def proxy(far: RunningDaemon) -> Iterator[Proxy]:
    with proxied(far.url) as made:
        yield made


@pytest.fixture
def run() -> str:
    return f"far-{next(_runs)}"


def random_state(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)}


def check_saved(url: str, run: str, step: int, expected: dict[str, torch.Tensor], source: str = "http") -> None:
    """A newcomer restores exactly this, from there."""
    live = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with Checkpointer(run, live, at=url) as checkpointer:
        assert checkpointer.restore() == step
        assert checkpointer.last_restore.source == source
    for name, tensor in expected.items():
        assert torch.equal(live[name], tensor), name


def ranks(
    monkeypatch: pytest.MonkeyPatch, run: str, states: list[dict], url: str, policy: Policy = "newest-wins"
) -> list[Checkpointer]:
    """The ranks of one launch, in this process."""
    made = []
    monkeypatch.setenv("WORLD_SIZE", str(len(states)))
    monkeypatch.setenv("HOLDFAST_LAUNCH", f"launch-{run}")
    for rank, state in enumerate(states):
        monkeypatch.setenv("RANK", str(rank))
        made.append(Checkpointer(run, state, at=url, policy=policy))
    for name in ("WORLD_SIZE", "HOLDFAST_LAUNCH", "RANK"):
        monkeypatch.delenv(name)
    return made


def test_there_are_no_links_on_another_machine(far: RunningDaemon, run: str, tmp_path: Path) -> None:
    """A directory of that name here would be another one."""
    with Checkpointer(run, {"model": torch.nn.Linear(2, 2)}, at=far.url) as checkpointer:
        ticket = checkpointer.save(1)
        with pytest.raises(InvalidRequest, match="not on this machine"):
            checkpointer.link(ticket, tmp_path / "link")
        ticket.result()
    assert not list(tmp_path.iterdir())


def test_the_same_save_and_restore(far: RunningDaemon, run: str) -> None:
    """Save, change, save, restore: bit-exact, though not a byte of memory is shared."""
    state = {**random_state(3 * MIB + 5), "epoch": 4, "empty": torch.empty(0)}
    before = state["x"].clone()
    with Checkpointer(run, state, at=far.url) as checkpointer:
        assert checkpointer.restore() == 0
        ticket = checkpointer.save(1, wait="staged", metrics={"loss": 1.5})
        assert ticket.staged
        state["x"].zero_()
        assert ticket.result(180).step == 1
        checkpointer.save(2)
        checkpointer.save(3)
        state["x"].fill_(7)
    with Api(far.url) as api:
        assert [made.step for made in api.checkpoints(run)] == [3, 2, 1]
        assert api.checkpoint(run, 1).metrics == {"loss": 1.5}
    with Checkpointer(run, state, at=far.url) as checkpointer:
        assert checkpointer.restore(1) == 1
        assert torch.equal(state["x"], before)


def test_the_slot_of_a_later_save_is_known_ahead(far: RunningDaemon, run: str) -> None:
    """A rank with slots of its own asks itself."""
    with Checkpointer(run, {"x": torch.ones(8)}, at=far.url) as checkpointer:
        checkpointer.prepare(wait=True)
        slots = checkpointer._reservation.slots
        assert slots is not None and slots.foresee() == 0


def test_a_step_exists_once_and_an_older_launch_is_fenced_off(far: RunningDaemon, run: str) -> None:
    """save() itself raises what refuses the step, as beside the daemon."""
    first = Checkpointer(run, {"x": torch.ones(1)}, at=far.url)
    first.save(1, wait="durable")
    with pytest.raises(AlreadyCommitted):
        first.save(1)
    with Checkpointer(run, {"x": torch.ones(1)}, at=far.url) as second:
        assert second.restore() == 1
        second.save(2, wait="durable")
        with pytest.raises(StaleAttempt):
            first.save(3)
    first.close()


def test_two_remote_ranks_make_one_checkpoint(far: RunningDaemon, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each uploads its own half; the commit holds both."""
    halves = [torch.arange(1000), torch.arange(1000, 2000)]
    states = [{"x": Fragment(half, (2000,), offset=(1000 * rank,))} for rank, half in enumerate(halves)]
    world = ranks(monkeypatch, run, states, url=far.url)
    tickets = [checkpointer.save(1) for checkpointer in world]
    assert [ticket.result(180).step for ticket in tickets] == [1, 1]
    for checkpointer in world:
        checkpointer.close()
    check_saved(far.url, run, 1, {"x": torch.arange(2000)})


def test_a_rank_beside_the_daemon_and_one_far_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One world of a rank over the socket and a rank over HTTP."""
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon:
        halves = [torch.arange(1000), torch.arange(1000, 2000)]
        states = [{"x": Fragment(half, (2000,), offset=(1000 * rank,))} for rank, half in enumerate(halves)]
        near, far = ranks(monkeypatch, "r", states, url=daemon.url)
        assert near.restore() == 0
        hide(daemon)
        assert far.restore() == 0
        tickets = [near.save(1), far.save(1)]
        assert [ticket.result(180).step for ticket in tickets] == [1, 1]
        assert (near._reservation.slots is not None, type(far._session._link._transport)) == (True, RemoteLink)
        near.close()
        far.close()
        check_saved(daemon.url, "r", 1, {"x": torch.arange(2000)})


def test_a_link_that_is_cut_in_the_middle(far: RunningDaemon, proxy: Proxy, run: str) -> None:
    """The upload goes on where it broke: the commit is bit-exact, and little was sent twice."""
    size = 48 * MIB
    state = random_state(size)
    with Checkpointer(run, state, at=proxy.url) as checkpointer:
        checkpointer.restore()
        proxy.cut_after = proxy.sent + 20 * MIB
        checkpointer.save(1, wait="durable")
    assert proxy.cuts == 1
    assert size < proxy.sent < size + 17 * MIB, "resumed, not begun anew"
    check_saved(far.url, run, 1, state)


def test_a_slow_link_gets_packed_chunks(far: RunningDaemon, proxy: Proxy, run: str) -> None:
    """Where the link is slower than the codec, what can be packed is packed."""
    size = 24 * MIB
    state = {"x": torch.arange(size // 8)}
    with Checkpointer(run, state, at=proxy.url) as checkpointer:
        checkpointer.restore()
        proxy.bytes_per_s, before = 8e6, proxy.sent
        checkpointer.save(1, wait="durable")
        proxy.bytes_per_s = None
    assert proxy.sent - before < size // 2
    check_saved(far.url, run, 1, state)


def test_a_link_that_stalls_stops_no_save(far: RunningDaemon, proxy: Proxy, run: str) -> None:
    """save() returns though nothing goes through; when the link flows again the step is committed."""
    state = random_state(MIB)
    with Checkpointer(run, state, at=proxy.url) as checkpointer:
        checkpointer.save(1, wait="durable")
        proxy.flows.clear()
        ticket = checkpointer.save(2, wait="staged")
        assert ticket.staged and not ticket.done
        proxy.flows.set()
        assert ticket.result(180).step == 2
    check_saved(far.url, run, 2, state)


def test_when_all_own_slots_are_on_their_way_the_next_save_waits(far: RunningDaemon, proxy: Proxy, run: str) -> None:
    """The rank's own slots are the limit: a lease waits for one, and then says so by name."""
    link = RemoteLink(proxy.url, lambda outcome: None, lambda error: None)
    hello = wire.Hello(id=link.next_id(), run=run, rank=0, world=1, launch="x")
    welcome = link.request(hello, wire.Welcome)
    attempt = welcome.attempt
    assert (welcome.root, welcome.url) == ("", proxy.url), "the daemon's directory is not ours to read"
    with pytest.raises(InvalidRequest, match="reserve a segment before"):
        link.request(wire.Lease(id=link.next_id(), step=1), wire.Granted)
    slots = Slots(link, 2, 1000, 1000)
    first = slots.lease(1, attempt, 0)
    slots.lease(2, attempt, 0)
    with pytest.raises(ArenaFull, match="all 2 slots"):
        slots.lease(3, attempt, 0.05)
    first.abandon(InvalidRequest("not now"))
    slots.lease(3, attempt, 0).abandon(InvalidRequest("not now"))
    link.close()
    assert not link.alive


def test_a_rank_that_parts_ends_the_round_of_the_others(
    far: RunningDaemon, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a world's save is no checkpoint: the other ranks are told at once."""
    first, second = ranks(monkeypatch, run, [{"x": torch.ones(1)}, {"x": torch.ones(1)}], url=far.url)
    ticket = first.save(1)
    assert second.restore() == 0
    second.close()
    with pytest.raises(RoundAborted):
        ticket.result(180)
    first.close(wait=False)


@pytest.mark.parametrize("uploaded", [False, True], ids=["in mid-upload", "uploaded"])
def test_the_daemon_dies_and_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uploaded: bool
) -> None:
    """The rank says hello to the next daemon, brings its slot again, and no step is lost."""
    states = [{"x": torch.arange(MIB)}, {"x": torch.arange(MIB)}]
    daemon = RunningDaemon(tmp_path / "root", listen="127.0.0.1:0")
    hide(daemon)
    with proxied(daemon.url) as proxy:
        first, second = ranks(monkeypatch, "r", states, url=proxy.url)
        first.restore()
        second.restore()
        if not uploaded:
            proxy.bytes_per_s = 1e6
        ticket = first.save(1)
        with Api(daemon.url) as api:
            wait_until(lambda: any(found.sealed == 1 for found in api.rounds("r")) is uploaded and proxy.sent > 300_000)
        daemon.kill()
        proxy.reset()
        proxy.bytes_per_s = None
        with far_daemon(tmp_path / "root", listen="127.0.0.1:0") as successor:
            proxy.port = int(successor.url.rpartition(":")[2])
            second.save(1, wait="durable")
            assert ticket.result(180).step == 1
            first.close()
            second.close()
            check_saved(successor.url, "r", 1, {"x": torch.arange(MIB)})


def test_a_trainer_that_dies_in_mid_upload(tmp_path: Path) -> None:
    """After the silence that is allowed the round is aborted; the checkpoint before it is untouched."""
    with far_daemon(tmp_path / "root", "--silence-max", "1") as daemon, proxied(daemon.url) as proxy, Api(daemon.url) as api:
        command = [Path(__file__).parents[1] / "remote_rank.py", proxy.url, "r"]
        with Forked([*command, 1, 1_000_000]) as trainer:
            wait_until(lambda: [made.step for made in api.checkpoints("r")] == [1] if trained(api) else False)
            trainer.kill()
        proxy.bytes_per_s = 500_000
        before = proxy.sent
        with Forked([*command, 2, 8_000_000]) as trainer:
            assert trainer.stdout is not None and trainer.stdout.readline() == "sealed\n"
            wait_until(lambda: proxy.sent > before + 400_000)
            trainer.kill()
        wait_until(lambda: [found.code for found in api.rounds("r", "aborted")] == ["round-aborted"])
        assert [made.step for made in api.checkpoints("r")] == [1]
        wait_until(lambda: api.nodes()[0].arena_bytes == 0)
        expected = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 1_000_000, np.uint8))
        held = naming.checkpoint_path("r", 1)
        assert (tmp_path / "root" / held / "model.safetensors").read_bytes().endswith(expected.numpy().tobytes())


def trained(api: Api) -> bool:
    return any(found.name == "r" for found in api.runs())


def test_a_service_that_does_not_answer_is_named() -> None:
    """Nobody at the address: an error with a hint, and no thread left behind."""
    before = set(threading.enumerate())
    with pytest.raises(DaemonGone, match="no answer"):
        Checkpointer("r", {"x": torch.ones(1)}, at="http://127.0.0.1:1").save(1)
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_another_daemons_socket_at_the_same_path_is_not_taken(tmp_path: Path) -> None:
    """A socket is the daemon's own only if inode and time say so; a name alone proves nothing on another machine."""
    path = tmp_path / "some.sock"
    path.touch()
    at = path.stat()

    def node(socket_id: str | None) -> bodies.Node:
        known = {"name": "n", "pid": 1, "version": "v", "root": "/", "started": "now", "arena_bytes": 0, "ranks": 0}
        return bodies.Node(socket=str(path), socket_id=socket_id, **known)  # type: ignore[arg-type]

    build_root(tmp_path / "root", {"tiny": (1,)})
    for socket_id, found in ((naming.socket_id(at.st_ino, at.st_ctime_ns), path), ("1-2", None), (None, None)):
        about = partial(node, socket_id)
        with served(tmp_path / "root", node=about) as service, Api(service.url) as api:
            assert socket_of(api) == found


def test_a_dropped_save_names_what_its_rank_waits_for(far: RunningDaemon, proxy: Proxy, run: str) -> None:
    """The rank decides alone, with its own slots: it is the upload, or a daemon that cannot be reached, not the storage."""
    with Checkpointer(run, random_state(MIB), at=proxy.url, slots=2) as checkpointer:
        checkpointer.save(1, wait="durable")
        proxy.flows.clear()
        tickets = [checkpointer.save(step, wait="staged") for step in (2, 3)]
        checkpointer.save(4)
        wait_until(lambda: any(ticket.done for ticket in tickets))
        slow = next(ticket.error for ticket in tickets if ticket.done)  # step 2 if its upload has not begun yet
        assert isinstance(slow, GenerationDropped) and proxy.url in slow.detail
        assert "the upload of step 2" in slow.detail or "does not answer" in slow.detail
        assert "faster storage" not in str(slow.hint)
        proxy.flows.set()


def test_a_drop_that_the_daemon_did_not_hear_of_is_told_again(
    far: RunningDaemon, proxy: Proxy, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has dropped a save whose upload was open, and the link broke: the daemon keeps no slot for it."""
    monkeypatch.setattr(uploader, "OPEN_TIMEOUT_S", 60.0)
    with Api(far.url) as api, Checkpointer(run, random_state(MIB), at=proxy.url, slots=2) as checkpointer:
        checkpointer.save(1, wait="durable")
        before, proxy.bytes_per_s = proxy.sent, 200_000
        checkpointer.save(2, wait="staged")
        wait_until(lambda: proxy.sent > before + PIECE_BYTES)  # its upload goes on, those of the next ones wait
        dropped = checkpointer.save(3, wait="staged")
        proxy.flows.clear()
        monkeypatch.setattr(uploader, "OPEN_TIMEOUT_S", 0.2)
        last = checkpointer.save(4)
        wait_until(lambda: dropped.done)
        assert dropped.dropped
        last.wait_staged(60)
        proxy.reset()
        proxy.bytes_per_s = None
        proxy.flows.set()
        last.result(180)
        wait_until(lambda: {made.step: made.state for made in api.rounds(run)}.get(3) == "dropped")
