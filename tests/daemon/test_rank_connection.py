"""A conversation whose connection ends while others ask about it."""

from __future__ import annotations

import socket

from holdfast_formats.root_files import RootMark
from holdfast_service.daemon.arena.callers import Callers
from holdfast_service.daemon.averaging.averages import Averages
from holdfast_service.daemon.rank_connection import DataPlane, RankConnection
from holdfast_service.daemon.rank_socket import RankSocket
from holdfast_service.daemon.saving.adoption import Adoption
from holdfast_service.daemon.serving import Serving
from tests.daemon.saver_world import saver_world

SERVING = Serving("node", "/root", RootMark(id="an-id"), "0", None)


def test_a_connection_that_is_closed_has_lost_its_rank() -> None:
    """The reaper and a rank that says hello may ask after the connection was closed; that failed, and ended the reaper."""
    with saver_world() as world:
        plane = DataPlane(
            world.arena,
            world.saver,
            world.control,
            Adoption(world.arena, world.saver, world.control),
            Averages(world.arena),
        )
        here, there = socket.socketpair()
        ended: list[RankConnection] = []
        conversation = RankConnection(RankSocket(here), plane, SERVING, Callers(), ended.append)
        assert not conversation.socket.has_lost_its_rank()
        conversation.thread.start()
        there.close()
        conversation.thread.join(180)
        assert ended == [conversation] and conversation.socket.has_lost_its_rank()
