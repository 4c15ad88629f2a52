"""Where nodes meet to save one checkpoint, on a real PostgreSQL: nobody gets lost, one commits, all hear how it ended."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress

import pytest
import zstandard
from sqlalchemy import delete, event, func, select, text, update

from holdfast_formats import timestamps
from holdfast_formats.errors import GenerationDropped, InvalidRequest, RoundAborted, StaleAttempt, StateMismatch
from holdfast_formats.lineage import Lineage, Rewind
from holdfast_formats.naming import Place
from holdfast_formats.staging import joined
from holdfast_formats.staging.joint import RoundState
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.cluster_schema import DeclarationRow, JointRoundRow
from holdfast_service.wings.cluster import joint_rounds, rendezvous, round_bodies, round_parts
from holdfast_service.wings.cluster.cluster import Cluster
from holdfast_service.wings.cluster.membership import later, now
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]
RUN = "run"


def arrive(node: Cluster, step: int, ranks: list[int], world: int = 2, attempt: int = 1, said: bytes = b"said") -> int:
    return node.rendezvous.arrive(RUN, step, attempt, world, ranks, b"declared", said)


def sealed(*made: Cluster, step: int = 1) -> int:
    """A round in which each of these nodes has brought one rank."""
    numbers = {arrive(node, step, [rank], len(made)) for rank, node in enumerate(made)}
    assert len(numbers) == 1
    number = numbers.pop()
    made[0].rendezvous.seal(number)
    return number


def test_a_checkpoint_of_several_nodes_is_created_by_the_database_s_clock(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock of the node says that was first there; also of a step that was begun once more."""
    for module in (round_parts, rendezvous):
        monkeypatch.setattr(module, "utc_now", lambda: "1970-01-01T00:00:00.000Z", raising=False)
    a = nodes.add("a")
    with a.database.read() as session:
        begun = timestamps.write(session.execute(select(now())).scalar_one())
    number = arrive(a, 1, [0])
    assert a.rendezvous.abort(number, RoundAborted("given up").problem())
    for created in (a.rendezvous.rounds(number).created, a.rendezvous.rounds(arrive(a, 1, [0])).created):
        assert created >= begun and timestamps.write(timestamps.read(created)) == created


def test_a_round_from_arrival_to_commit(nodes: Nodes) -> None:
    """Open until both parts are there; then both read the same parts; claimed once both have delivered; known to both."""
    a, b = nodes.add("a"), nodes.add("b")
    number = arrive(a, 1, [0], said=b"of a")
    a.rendezvous.seal(number)
    assert a.rendezvous.rounds(number).state == "open" and a.rendezvous.rounds(number).absent == {1}
    assert arrive(b, 1, [1], said=b"of b") == number
    b.rendezvous.seal(number)
    seen = a.rendezvous.rounds(number)
    assert seen == b.rendezvous.rounds(number) and (seen.state, seen.absent) == ("sealed", set())
    assert [(one.node, one.ranks, one.live, one.delivered) for one in seen.parts] == [
        ("a", (0,), True, False),
        ("b", (1,), True, False),
    ]
    found = a.rendezvous.parts(number)
    assert found == b.rendezvous.parts(number)
    assert [(declared, said) for _, declared, said in found] == [(b"declared", b"of a"), (b"declared", b"of b")]
    a.rendezvous.deliver(number, b"by a")
    assert not a.rendezvous.claim(number)
    b.rendezvous.deliver(number, b"by b")
    assert b.rendezvous.claim(number) and not a.rendezvous.claim(number)
    assert a.rendezvous.receipts(number) == [b"by a", b"by b"]
    assert a.rounds.is_writing(RUN)
    b.rendezvous.committed(number)
    assert a.rendezvous.rounds(number).state == "committed" and not a.rounds.is_writing(RUN)


def test_many_arrive_at_once_and_none_is_lost(nodes: Nodes) -> None:
    """32 parts of 8 nodes by 8 threads each time: one round, all ranks in it, sealed once."""
    made = [nodes.add(f"n{number}") for number in range(8)]
    for step in range(1, 6):
        found: list[int] = []
        start = threading.Barrier(len(made))

        def bring(node: Cluster, first: int) -> None:
            start.wait()  # noqa: B023 - the threads of this step
            number = arrive(node, step, list(range(first, first + 4)), 32)  # noqa: B023
            node.rendezvous.seal(number)
            found.append(number)  # noqa: B023

        threads = [threading.Thread(target=bring, args=(node, 4 * place)) for place, node in enumerate(made)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8 and len(set(found)) == 1
        assert made[0].rendezvous.rounds(found[0]).state == "sealed"


def test_one_of_many_claims_the_commit(nodes: Nodes) -> None:
    """Two hundred races of four nodes."""
    made = [nodes.add(name) for name in "abcd"]
    for step in range(1, 51):
        number = sealed(*made, step=step)
        for node in made:
            node.rendezvous.deliver(number, b"done")
        got: list[bool] = []
        start = threading.Barrier(len(made))

        def race(node: Cluster) -> None:
            start.wait()  # noqa: B023
            got.append(node.rendezvous.claim(number))  # noqa: B023

        threads = [threading.Thread(target=race, args=(node,)) for node in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == [False, False, False, True]


def test_a_claim_ends(nodes: Nodes) -> None:
    """Who has claimed and is not heard of any more is replaced; it cannot end the round of the next one."""
    a, b = nodes.add("a"), nodes.add("b")
    number = sealed(a, b)
    for node in (a, b):
        node.rendezvous.deliver(number, b"done")
    assert a.rendezvous.claim(number) and not b.rendezvous.claim(number)
    with a.database.write() as session:
        session.execute(update(JointRoundRow).values(claimed_until=later(-1)))
    assert b.rendezvous.claim(number)
    assert not a.rendezvous.abort(number, RoundAborted("late").problem(), claimed=True)
    assert not a.rendezvous.abort(number, RoundAborted("late").problem())
    assert a.rendezvous.rounds(number).state == "committing"
    assert b.rendezvous.abort(number, RoundAborted("the disk is full").problem(), claimed=True)
    assert a.rendezvous.rounds(number).state == "aborted"


def test_a_claim_ends_with_the_lease_of_its_node(nodes: Nodes) -> None:
    a, b = nodes.add("a"), nodes.add("b")
    number = sealed(a, b)
    for node in (a, b):
        node.rendezvous.deliver(number, b"done")
    assert a.rendezvous.claim(number) and not b.rendezvous.claim(number)
    nodes.lapse(a)
    assert b.rendezvous.claim(number) and b.rendezvous.claim(number)


def test_the_first_receipt_of_a_node_stands(nodes: Nodes) -> None:
    """A node that comes back writes again, and does not change what others may have read already."""
    a, b = nodes.add("a"), nodes.add("b")
    number = sealed(a, b)
    a.rendezvous.deliver(number, b"first")
    a.rendezvous.deliver(number, b"second")
    b.rendezvous.deliver(number, b"other")
    assert a.rendezvous.receipts(number) == [b"first", b"other"]


def test_who_comes_back_with_what_is_committed_is_told_so(nodes: Nodes) -> None:
    """The same part, from a daemon that was started again, leads to the same round; another one of that step, which is to
    replace it, to a new one. So does the same part from a daemon that has seen the end: the step was removed, and is saved
    again.
    """
    a, b, c = nodes.add("a"), nodes.add("b"), nodes.add("c")
    number = sealed(a, b, c)
    a.rendezvous.committed(number)
    for node in (a, b):
        nodes.lapse(node)
        node.membership.beat()
    assert arrive(a, 1, [0], 3) == number == arrive(b, 1, [1], 3)
    assert arrive(a, 1, [0], 3, said=b"again") != number != arrive(c, 1, [2], 3)


def test_no_part_changes_once_all_are_there(nodes: Nodes) -> None:
    """What was sealed is what everybody plans from; a daemon that comes back brings the same."""
    a, b = nodes.add("a"), nodes.add("b")
    number = sealed(a, b)
    assert arrive(a, 1, [0]) == number
    with pytest.raises(RoundAborted, match="already"):
        arrive(a, 1, [0, 1])
    with pytest.raises(RoundAborted, match="already"):
        a.rendezvous.arrive(RUN, 1, 1, 2, [0], b"another declaration", b"said")
    with pytest.raises(RoundAborted, match="already"):
        arrive(a, 1, [0], said=b"what it said in another save of this step")
    assert [said for _, _, said in b.rendezvous.parts(number)] == [b"said", b"said"]


def test_two_nodes_with_the_same_ranks_end_the_round(nodes: Nodes) -> None:
    """A rank is in one place."""
    a, b = nodes.add("a"), nodes.add("b")
    number = arrive(a, 1, [0, 1])
    arrive(b, 1, [1])
    b.rendezvous.seal(number)
    assert a.rendezvous.rounds(number).state == "aborted"
    with pytest.raises(StateMismatch, match="world size"):
        arrive(b, 2, [0], world=3), arrive(a, 2, [1], world=2)


def test_an_older_attempt_brings_nothing(nodes: Nodes) -> None:
    """I6, by what the catalog knows."""
    a = nodes.add("a")
    catalog = Catalog(a.database, "a")
    assert [catalog.declare_attempt(RUN, launch, 1, "2026-01-01T00:00:00Z") for launch in ("first", "second")] == [1, 2]
    with pytest.raises(StaleAttempt):
        arrive(a, 1, [0], attempt=1)
    assert arrive(a, 1, [0], attempt=2)
    with pytest.raises(StaleAttempt):  # also where what its ranks hold is known
        arrive(a, 2, [0], attempt=1)


def test_how_far_a_round_is(nodes: Nodes) -> None:
    """How many ranks were brought, and whether all have written."""
    a, b = nodes.add("a"), nodes.add("b")
    number = arrive(a, 1, [0, 2], 3)
    assert a.rendezvous.state(number) == RoundState("open", None, 3, 2, False)
    arrive(b, 1, [1], 3)
    assert a.rendezvous.state(number).brought == 3
    a.rendezvous.seal(number)
    a.rendezvous.deliver(number, b"done")
    assert b.rendezvous.state(number) == RoundState("sealed", None, 3, 3, False)
    b.rendezvous.deliver(number, b"done")
    assert a.rendezvous.state(number).written
    with pytest.raises(RoundAborted, match="lost"):
        a.rendezvous.state(number + 1)


def test_a_round_that_is_made_while_the_step_is_given_up(nodes: Nodes) -> None:
    """It comes after the look for one to end."""
    a, b = nodes.add("a"), nodes.add("b")
    arrive(a, 1, [0])  # what it holds is known from then on
    made: list[int] = []

    def comes(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if statement.startswith("UPDATE joint_rounds") and not made:
            made.append(arrive(a, 2, [0]))

    event.listen(b.database.engine, "after_cursor_execute", comes)
    b.rendezvous.refuse(RUN, 2, 1, 2, RoundAborted("a rank is gone").problem())
    assert a.rendezvous.state(made[0]).state == "aborted"


def test_a_step_is_given_up_at_the_moment_when_it_begins(nodes: Nodes) -> None:
    """Nobody waits for who has given it up: either their round has ended, or they hear it as they come."""
    made = [nodes.add(name) for name in "abc"]
    problem = RoundAborted("a rank is gone").problem()
    for step in range(1, 61):
        open_ones: list[tuple[Cluster, int]] = []
        start = threading.Barrier(len(made))

        def bring(node: Cluster, rank: int) -> None:
            start.wait()  # noqa: B023 - the threads of this step
            with suppress(RoundAborted):
                open_ones.append((node, arrive(node, step, [rank], 3)))  # noqa: B023

        def refuse(node: Cluster) -> None:
            start.wait()  # noqa: B023
            node.rendezvous.refuse(RUN, step, 1, 3, problem)  # noqa: B023

        threads = [threading.Thread(target=bring, args=(node, rank)) for rank, node in enumerate(made[:2])]
        threads.append(threading.Thread(target=refuse, args=(made[2],)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [node.rendezvous.state(number).state for node, number in open_ones] == ["aborted"] * len(open_ones)


def test_who_gives_up_ends_it_for_all_and_each_hears_it_once(nodes: Nodes) -> None:
    """Before the others arrive, and after; then the same step may be tried again by all."""
    a, b, c = nodes.add("a"), nodes.add("b"), nodes.add("c")
    dropped = GenerationDropped.of(1, 2, "newest-wins").problem()
    number = arrive(b, 1, [1], 3)
    a.rendezvous.refuse(RUN, 1, 1, 3, dropped)
    assert b.rendezvous.rounds(number).state == "aborted"
    b.rendezvous.receive_part(number)
    with pytest.raises(GenerationDropped):
        arrive(c, 1, [2], 3)
    again = {arrive(node, 1, [rank], 3) for rank, node in enumerate((a, b, c))}
    assert len(again) == 1 and number not in again

    a.rendezvous.refuse(RUN, 5, 1, 3, dropped)  # nobody has arrived yet
    for node, rank in ((b, 1), (c, 2)):
        with pytest.raises(GenerationDropped):
            arrive(node, 5, [rank], 3)
    assert len({arrive(node, 5, [rank], 3) for rank, node in enumerate((a, b, c))}) == 1


def test_two_nodes_give_up_the_same_step(nodes: Nodes) -> None:
    """It ends once, and nobody is told of it when the step is tried again."""
    a, b = nodes.add("a"), nodes.add("b")
    problem = RoundAborted("a rank is gone").problem()
    a.rendezvous.refuse(RUN, 1, 1, 2, problem)
    b.rendezvous.refuse(RUN, 1, 1, 2, problem)
    assert arrive(a, 1, [0]) == arrive(b, 1, [1])


def test_a_node_that_is_gone_is_seen(nodes: Nodes) -> None:
    """Its lease has ended; or it has started anew, and has not brought its part again."""
    a, b = nodes.add("a"), nodes.add("b")
    number = sealed(a, b)
    nodes.lapse(b)
    gone = a.rendezvous.rounds(number).parts[1]
    assert (gone.live, gone.known) == (False, False)
    b.membership.beat()
    back = a.rendezvous.rounds(number).parts[1]
    assert (back.live, back.known) == (False, True)
    assert b.rendezvous.state(number) == RoundState("sealed", None, 2, 2, False)
    assert a.rendezvous.rounds(number).parts[1].live
    assert arrive(b, 1, [1]) == number


def test_a_round_that_all_nodes_have_left_keeps_nobody_waiting(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch waits for it any more, and the care of the root ends it; one that has a node goes on."""
    monkeypatch.setattr(joint_rounds, "ABANDONED_S", 0.0)
    a, b, c = nodes.add("a"), nodes.add("b"), nodes.add("c")
    left, going = sealed(a, b, step=1), sealed(a, c, step=2)
    assert c.rounds.is_writing(RUN) and c.rounds.end_abandoned() == []
    nodes.lapse(a), nodes.lapse(b)
    assert c.rounds.end_abandoned() == [(RUN, 1)]
    assert (c.rendezvous.rounds(left).state, c.rendezvous.rounds(going).state) == ("aborted", "sealed")
    c.rendezvous.abort(going, RoundAborted("over").problem())
    assert not c.rounds.is_writing(RUN)


def test_places_are_those_of_rounds_that_go_on(nodes: Nodes) -> None:
    """Open, sealed or being committed: what they have staged is spared by the sweep. Ended ones have none."""
    a, b = nodes.add("a"), nodes.add("b")
    open_one, sealed_one, claimed, ended = arrive(a, 1, [0]), sealed(a, b, step=2), sealed(a, b, step=3), arrive(a, 4, [0])
    for node in (a, b):
        node.rendezvous.deliver(claimed, b"done")
    assert a.rendezvous.claim(claimed)
    a.rendezvous.abort(ended, RoundAborted("over").problem())
    going = {Place(RUN, step, 1, number) for step, number in ((1, open_one), (2, sealed_one), (3, claimed))}
    assert set(b.rounds.places()) == going


def test_votes(nodes: Nodes) -> None:
    """Which ranks have ended, from all nodes; damage on one is heard by all, and stays."""
    a, b = nodes.add("a"), nodes.add("b")
    assert a.rendezvous.vote(RUN, 1, 1, {0}).ranks == {0}
    assert b.rendezvous.vote(RUN, 1, 1, {2, 3}).ranks == {0, 2, 3}
    problem = RoundAborted("damage").problem()
    assert a.rendezvous.vote(RUN, 1, 1, {0, 1}, problem).ranks == {0, 1, 2, 3}
    assert a.rendezvous.vote(RUN, 1, 1, {0, 1}).problem == problem == b.rendezvous.vote(RUN, 1, 1, {2, 3}).problem
    assert b.rendezvous.vote(RUN, 1, 2, {2}) == rendezvous.Votes(frozenset({2}), None)


def test_many_declarations_are_read_as_one_body(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by who seals, once for a launch. Who does not find it reads each alone; both are the same."""
    monkeypatch.setattr(round_bodies, "TOGETHER_MIN", 3)
    made = [nodes.add(name) for name in "abc"]
    name = joined.name_of(hashlib.sha256(b"of %d" % rank).hexdigest() for rank in range(3))
    for step in (1, 2):
        numbers = {one.rendezvous.arrive(RUN, step, 1, 3, [r], b"of %d" % r, b"said") for r, one in enumerate(made)}
        (number,) = numbers
        made[0].rendezvous.seal(number)
        with made[0].database.read() as session:
            rows = session.scalar(select(func.count()).select_from(DeclarationRow))
            assert rows == 4 and session.get(DeclarationRow, name) is not None
        found = made[1].rendezvous.parts(number)
        assert [(declared, said) for _, declared, said in found] == [(b"of %d" % rank, b"said") for rank in range(3)]
    with made[0].database.write() as session:
        session.execute(delete(DeclarationRow).where(DeclarationRow.digest == name))
    assert made[2].rendezvous.parts(number) == found


def test_a_declaration_that_is_not_what_its_digest_says(nodes: Nodes) -> None:
    """Another body under its digest is refused."""
    a, b = nodes.add("a"), nodes.add("b")
    number = sealed(a, b)
    with a.database.write() as session:
        session.execute(update(DeclarationRow).values(body=zstandard.compress(b"another")))
    with pytest.raises(InvalidRequest, match="does not match its digest"):
        a.rendezvous.parts(number)


def test_what_is_not_sealed_has_no_parts_yet(nodes: Nodes) -> None:
    """They may still change."""
    a = nodes.add("a")
    with pytest.raises(RoundAborted, match="the round is open"):
        a.rendezvous.parts(arrive(a, 1, [0]))


def test_a_sealed_round_is_what_all_nodes_have_brought(nodes: Nodes) -> None:
    """The nodes, their ranks, and where each listens."""
    a, b = nodes.add("a"), nodes.add("b")
    b.membership.about = lambda: {"exchange": "http://b:1"}
    b.membership.beat()
    seen = a.rendezvous.sealed(sealed(a, b))
    assert [(one.node, one.ranks, one.url) for one in seen.parts] == [("a", (0,), ""), ("b", (1,), "http://b:1")]
    assert (seen.state, seen.world, seen.absent) == ("sealed", 2, set())


def test_what_is_over_is_forgotten(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and declarations go after their round; those of rounds that go on stay."""
    a = nodes.add("a")
    ended, going = arrive(a, 1, [0]), arrive(a, 2, [0])
    a.rendezvous.vote(RUN, 1, 1, {0})
    a.rendezvous.abort(ended, RoundAborted("over").problem())
    a.rounds.forget()
    assert a.rendezvous.rounds(ended).state == "aborted"
    monkeypatch.setattr(joint_rounds, "_KEPT_S", 0.0)
    a.rounds.forget()
    with pytest.raises(RoundAborted, match="lost"):
        a.rendezvous.rounds(ended)
    assert not a.rendezvous.abort(ended, RoundAborted("again").problem())
    assert a.rendezvous.rounds(going).state == "open"
    b = nodes.add("b")
    assert arrive(b, 2, [1]) == going
    b.rendezvous.seal(going)
    assert [declared for _, declared, _ in a.rendezvous.parts(going)] == [b"declared"] * 2
    assert a.rendezvous.vote(RUN, 1, 1, set()).ranks == set()


def test_a_catalog_from_a_backup_gives_no_number_out_twice(nodes: Nodes) -> None:
    """What is still written for the round that it has lost has another path than the next one, which is of the same step."""
    a = nodes.add("a")
    lost = arrive(a, 1, [0])
    a.rendezvous.refuse(RUN, 2, 1, 2, RoundAborted("a rank is gone").problem())
    with a.database.write() as session:
        for table in ("parts", "joint_rounds"):
            session.execute(text(f"TRUNCATE {table} RESTART IDENTITY CASCADE"))
    found = [arrive(a, 1, [0]), arrive(a, 2, [0])]
    assert lost not in found and min(found) > lost and len(set(found)) == 2


def test_a_daemon_that_was_started_again_hears_how_the_round_ended(nodes: Nodes) -> None:
    """It had brought its part, and was killed; the others have ended that round, and try the step again. What it still has
    is of the round before: it does not come among what the others bring now.
    """
    a, b = nodes.add("a"), nodes.add("b")
    first = arrive(a, 1, [0], said=b"first")
    assert arrive(b, 1, [1], said=b"first") == first
    a.rendezvous.abort(first, RoundAborted("a rank is gone").problem())
    second = arrive(a, 1, [0], said=b"second")
    with pytest.raises(RoundAborted, match="a rank is gone"):
        arrive(b, 1, [1], said=b"first")
    assert arrive(b, 1, [1], said=b"second") == second != first
    b.rendezvous.abort(second, RoundAborted("another rank is gone").problem())
    a.rendezvous.receive_part(second)  # its ranks have been told
    assert arrive(a, 1, [0], said=b"third") == arrive(b, 1, [1], said=b"third")


def test_nobody_hears_of_a_round_that_goes_on(nodes: Nodes) -> None:
    """Its parts stay what they are."""
    a, b = nodes.add("a"), nodes.add("b")
    number = sealed(a, b)
    for node in (a, b):
        node.rendezvous.receive_part(number)
        node.rendezvous.deliver(number, b"done")
    assert a.rendezvous.claim(number) and not b.rendezvous.abort(number, RoundAborted("late").problem(), claimed=True)
    assert [said for _, _, said in b.rendezvous.parts(number)] == [b"said", b"said"]


def test_all_who_commit_a_round_state_the_same_lineage(nodes: Nodes) -> None:
    """The first one's, also to one that stood still since it had claimed: two manifests must not meet in one directory."""
    a, b = nodes.add("a"), nodes.add("b")
    number = sealed(a, b)
    found = Lineage(3, 1, (Rewind(2, 1, 3),))
    assert a.rendezvous.settle(number, found) == found
    assert b.rendezvous.settle(number, Lineage(3, 1)) == found == a.rendezvous.settle(number, Lineage())
    with pytest.raises(RoundAborted, match="lost"):
        a.rendezvous.settle(number + 1, found)
