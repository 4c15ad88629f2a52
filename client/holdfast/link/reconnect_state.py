"""What a rank brings to the next daemon when its own has died, and what it answers itself until there is one."""

from __future__ import annotations

import os

from holdfast.link import unattended
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging import wire


class ReconnectState:
    """The hello, copies of the descriptors of shared memory, open saves, and messages that no daemon has answered.

    Not thread-safe: the link changes it with its condition held, so that no reconnect comes between.
    """

    def __init__(self) -> None:
        self.hello: wire.Hello | None = None
        self.attempt: int | None = None
        self.segment = -1
        self.average = -1
        self.unsaid: list[wire.Seal | wire.Abandon] = []  # that no daemon has answered
        self._spilled = False  # the segment is a file on disk
        self._awaited: dict[int, int] = {}  # step -> the turn of its save

    def note(self, message: wire.Request, reply: wire.Reply) -> None:
        """Remember what to send to the next daemon."""
        if isinstance(message, wire.Hello) and isinstance(reply, wire.Welcome) and self.hello is None:
            # By its id alone: what the directory's numbers are now is for the root's daemons to say.
            self.hello = message.model_copy(update={"root": RootMark(id=reply.mark.id)})
            self.attempt = reply.attempt
        elif isinstance(reply, wire.Segment):
            self._spilled = reply.spilled
        elif isinstance(message, wire.Lease) and isinstance(reply, wire.Granted):
            self._awaited[message.step] = message.intent.turn
        elif isinstance(message, wire.Abandon) or (isinstance(message, wire.Seal) and isinstance(reply, wire.Failed)):
            self._awaited.pop(message.step, None)

    def ended(self, step: int) -> None:
        """The save of this step has its outcome."""
        self._awaited.pop(step, None)

    def keep_segment(self, fd: int) -> None:
        """Keep a copy of this descriptor, in the place of the one before."""
        if self.segment >= 0:
            os.close(self.segment)
        self.segment = os.dup(fd)

    def keep_average(self, fd: int) -> None:
        """Keep a copy of this descriptor, in the place of the one before."""
        if self.average >= 0:
            os.close(self.average)
        self.average = os.dup(fd)

    def attach(self, id: int) -> wire.Attach:
        """The request that goes with the segment: which saves are open, by step."""
        awaited = dict(sorted(self._awaited.items()))
        return wire.Attach(id=id, open=tuple(awaited), turns=tuple(awaited.values()))

    def answer(self, message: wire.Request, may_lease: bool) -> wire.Reply | None:
        """Answer a request that needs no daemon, because the next one finds it in the segment or is told; else None."""
        if isinstance(message, wire.Seal):
            self.unsaid.append(message)
            return wire.Sealed(reply_to=message.id)
        if isinstance(message, wire.Abandon):  # else its slot stayed leased at the next daemon, until that gave it up
            self.unsaid.append(message)
            self._awaited.pop(message.step, None)
            return wire.Done(reply_to=message.id)
        if not may_lease or self.segment < 0 or self._spilled or self.attempt is None:
            return None
        if not isinstance(message, wire.Lease) or message.intent.existing == "same":
            return None
        slot = unattended.take_slot(self.segment, message.step, self.attempt)
        if slot is not None:
            reply = wire.Granted(reply_to=message.id, slot=slot, deadline_s=0.0)
            self.note(message, reply)
            return reply
        if message.policy == "wait":
            return None
        # Without a daemon nothing that waits is dropped for it: it is, and the next daemon drops other ranks' parts of it.
        problem = unattended.dropped(message.step, message.policy).problem()
        self.unsaid.append(wire.Abandon(id=message.id, slot=0, step=message.step, problem=problem))
        return wire.Failed(reply_to=message.id, problem=problem)

    def close(self) -> None:
        """Close the kept descriptors."""
        for fd in (self.segment, self.average):
            if fd >= 0:
                os.close(fd)
        self.segment = self.average = -1
