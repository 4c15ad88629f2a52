"""How long training stood still for a save reaches the history of its round, over the socket and over HTTP."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from holdfast import Api, Checkpointer, Fragment
from holdfast.link.unix_socket import SocketLink
from holdfast_formats.errors import CheckpointError, DaemonGone, InvalidRequest
from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import SaveTimes
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging import wire
from tests.daemons import RunningDaemon, hide, running, wait_until
from tests.proxies import proxied


def the_round(api: Api, step: int) -> bodies.Round:
    return next(made for made in api.rounds("r") if made.step == step)


def stall(api: Api, step: int) -> float:
    """What is kept of a save's stall, once it is."""
    wait_until(lambda: "stall_s" in (the_round(api, step).measured or {}))
    return (the_round(api, step).measured or {})["stall_s"]


@pytest.mark.parametrize("wait", [None, "staged", "durable"])
def test_beside_the_daemon(tmp_path: Path, wait: str | None) -> None:
    """save() and the fence behind it count, what training does between them does not; `durable` counts until the commit."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        with Checkpointer("r", {"model": model, "optim": optimizer}, at=daemon.root) as checkpointer:
            for step in (1, 2):
                model(torch.ones(64)).sum().backward()
                optimizer.step()
                began = time.monotonic()
                checkpointer.save(step, wait=wait)
                took = time.monotonic() - began
            between = time.monotonic()
            time.sleep(0.3)
            checkpointer.fence()
            took += time.monotonic() - between - 0.3
            assert 0 < stall(api, 2) <= took + 0.01
        made = the_round(api, 2)
        wait_until(lambda: "verify_s" in (the_round(api, 1).measured or {}))
        assert (made.state, made.node is not None) == ("committed", True)
        assert SaveTimes.model_validate(made.measured).bytes == api.checkpoint("r", 2).bytes


def test_over_http(tmp_path: Path) -> None:
    """It goes with the seal, where the upload takes longer than the way to the fence."""
    state = {"x": Fragment(torch.zeros(400_000, dtype=torch.uint8), (400_000,), offset=(0,))}
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon:
        hide(daemon)
        with proxied(daemon.url) as proxy, Api(daemon.url) as api:
            proxy.bytes_per_s = 400_000
            with Checkpointer("r", state, at=proxy.url) as checkpointer:
                state["x"].tensor.random_()
                ticket = checkpointer.save(1)
                checkpointer.fence()
                proxy.bytes_per_s = None
                ticket.result(180)
            assert stall(api, 1) > 0


def test_another_protocol_is_refused_by_name(tmp_path: Path) -> None:
    """A trainer that is older or newer than the daemon is told so, before anything is staged."""
    with running(tmp_path / "root") as daemon:
        for protocol in (wire.PROTOCOL - 1, wire.PROTOCOL + 1):
            link = _link(daemon)
            hello = wire.Hello(id=0, protocol=protocol, run="r", rank=0, world=1, launch=f"of {protocol}")
            with pytest.raises(InvalidRequest, match=f"protocol {protocol}"):
                link.request(hello, wire.Welcome)
            link.close()


def test_what_is_told_to_nobody_is_lost_without_a_word(tmp_path: Path) -> None:
    """Training never fails for it: with the daemon gone, and after the link was closed."""
    with running(tmp_path / "root") as daemon:
        link = _link(daemon)
        daemon.kill()
    wait_until(lambda: not link.alive)
    link.notify(wire.Measured(id=1, step=1, stall_s=0.5))
    link.close()
    link.notify(wire.Measured(id=2, step=1, stall_s=0.5))


def _link(daemon: RunningDaemon) -> SocketLink:
    return SocketLink(daemon.socket, lambda outcome: None, lambda error: None)


def test_a_daemon_that_cannot_be_understood_is_given_up(tmp_path: Path) -> None:
    """Dialling again would end the same way, for ever: the link is lost, and says why."""
    path, dialled = tmp_path / "sock", []
    lost: list[CheckpointError] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                (hello,) = wire.FrameDecoder(wire.TO_DAEMON).feed(connection.recv(65_536))
                welcome = wire.Welcome(reply_to=hello.id, attempt=1, node="n", root="", mark=RootMark(id="r"), version="9")
                connection.sendall(wire.encode_frame(welcome))
                connection.recv(65_536)
                news = b'{"type":"news","reply_to":1}'
                connection.sendall(len(news).to_bytes(4, "little") + news)

        daemon = threading.Thread(target=answer)
        daemon.start()
        link = SocketLink(path, lambda outcome: None, lost.append, lambda: dialled.append(path) or path)
        link.request(wire.Hello(id=0, run="r", rank=0, world=1, launch="l"), wire.Welcome)
        with pytest.raises(DaemonGone, match="sent an invalid message") as refused:
            link.request(wire.Choose(id=1, turn=0), wire.Chosen)
        daemon.join()
        link.close()
    assert "same version" in refused.value.hint and dialled == [] and len(lost) == 1
