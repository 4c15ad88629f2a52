"""What a target is told, and when: once, again when it is time, and that it is over. Nothing here waits."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.rest.measurements import Acknowledgement, Attention
from holdfast_formats.timestamps import write
from holdfast_service.wings.notify.schedule import (
    AGAIN_S,
    ALERTS_MAX,
    SETTLED_S,
    NoticeKey,
    NotifiedAlert,
    alert_id,
    as_alert,
    current,
    notice_id,
    plan,
)
from holdfast_service.wings.notify.targets import HttpTarget

T0 = 1_800_000_000.0


def write_time(at: float) -> str:
    return write(datetime.fromtimestamp(at, timezone.utc))


def target(**more: Any) -> HttpTarget:
    return HttpTarget(name="ops", kind="webhook", url="http://a/", **more)


def alert(code: str = "run-died", level: Any = "error", text: str = "it is lost") -> Attention:
    return Attention(level=level, code=code, text=text, hint="look", step=5)


class World:
    """A target, and what it has been told: as notifier and catalog keep it."""

    def __init__(self, told: HttpTarget) -> None:
        self.target, self.known = told, dict[NoticeKey, NotifiedAlert]()
        self.gone: dict[NoticeKey, float] = {}
        self.dropped = 0

    def look(self, now: float, alerts: Mapping[NoticeKey, Attention], accepted: bool = True) -> list[tuple[str, str]]:
        """What is told at this time of these alerts."""
        self.gone = {key: self.gone.get(key, now) for key in self.known if key not in alerts}
        made = plan(self.target, alerts, self.known, {key: now - since for key, since in self.gone.items()}, now)
        self.known |= {told.key: told for told in made.added}
        self.dropped += made.dropped
        for key in made.forgotten:
            del self.known[key]
        if accepted:
            for told in made.firing:
                self.known[told.key] = told._replace(times=told.times + 1, last=now)
            for told in made.recovered:
                del self.known[told.key]
        return [("firing", told.key.run) for told in made.firing] + [("over", told.key.run) for told in made.recovered]


LOST = {NoticeKey("llama", "run-died"): alert()}


def test_a_message_states_when_the_alert_began() -> None:
    """Not when it was looked for; without a time of its own, or with one that is yet to come, it is the first look."""
    key = NoticeKey("llama", "run-died")
    for own, told in ((write_time(T0 - 3.7), T0 - 3.7), (None, T0), (write_time(T0 + 20), T0), ("long ago", T0)):
        item = alert().model_copy(update={"since": own})
        (found,) = plan(target(after_s=0), {key: item}, {}, {}, T0).firing
        assert as_alert("ops", found, False, None).since == write_time(told)


def test_an_alert_that_began_long_ago_is_not_sent_before_its_time() -> None:
    """Alerts state when the cause began, as the last commit; `after_s` is counted from the first look all the same."""
    world = World(target(after_s=30))
    late = {NoticeKey("llama", "no-commit"): alert("no-commit").model_copy(update={"since": write_time(T0 - 4000)})}
    assert world.look(T0, late) == [] and world.look(T0 + 29, late) == []
    assert world.look(T0 + 30, late) == [("firing", "llama")]
    assert [known.since for known in world.known.values()] == [T0 - 4000]


def test_an_alert_is_told_once_repeated_and_over() -> None:
    world = World(target(after_s=30, repeat_s=3600))
    assert world.look(T0, LOST) == []
    assert world.look(T0 + 29, LOST) == []
    assert world.look(T0 + 30, LOST) == [("firing", "llama")]
    assert world.look(T0 + 35, LOST) == []
    assert world.look(T0 + 30 + 3600, LOST) == [("firing", "llama")]
    assert world.look(T0 + 4000, {}) == []
    assert world.look(T0 + 4000 + SETTLED_S, {}) == [("over", "llama")]
    assert world.look(T0 + 9000, {}) == [] and world.known == {} and world.dropped == 0


def test_a_run_that_dies_again_at_once_is_told_again() -> None:
    """It was resumed for less time than it takes to be over, and whoever had acknowledged the first death sleeps. A trainer
    that crashes in a loop is told of four times an hour at most, and a death in the future not at all.
    """

    def died(at: float) -> dict[NoticeKey, Attention]:
        return {NoticeKey("llama", "run-died"): alert().model_copy(update={"since": write_time(at)})}

    world = World(target(after_s=0, repeat_s=0))
    assert world.look(T0 + 1, died(T0)) == [("firing", "llama")]
    assert world.look(T0 + AGAIN_S + 9, died(T0)) == []
    assert world.look(T0 + AGAIN_S + 20, {}) == []
    assert world.look(T0 + AGAIN_S + 40, died(T0 + AGAIN_S + 30)) == [("firing", "llama")]
    assert world.look(T0 + AGAIN_S + 60, died(T0 + AGAIN_S + 50)) == []
    assert world.look(T0 + 2 * AGAIN_S + 40, died(T0 + AGAIN_S + 50)) == [("firing", "llama")]
    assert world.look(T0 + 9 * AGAIN_S, died(T0 + 10 * AGAIN_S)) == []


def test_what_somebody_has_acknowledged_is_not_told() -> None:
    """Neither at first nor again; that it is over is, if it was told before."""
    seen = Acknowledgement(by="ann", at="2030-01-01T00:00:00Z")
    acknowledged = {key: item.model_copy(update={"acknowledged": seen}) for key, item in LOST.items()}
    world = World(target(after_s=0, repeat_s=60))
    assert world.look(T0, acknowledged) == []
    assert world.look(T0 + 1, LOST) == [("firing", "llama")]
    assert world.look(T0 + 100, acknowledged) == []
    assert world.look(T0 + 200, {}) == [] and world.look(T0 + 200 + SETTLED_S, {}) == [("over", "llama")]


def test_what_flutters_is_told_once() -> None:
    """An alert that is away for a moment is neither over nor new."""
    world = World(target(after_s=0))
    assert world.look(T0, LOST) == [("firing", "llama")]
    for second in range(1, 200, 10):
        assert world.look(T0 + second, LOST if second % 20 == 1 else {}) == []


def test_what_is_over_before_it_was_told_is_counted() -> None:
    """While a receiver was away, an alert came and went: nobody is told of it any more."""
    world = World(target(after_s=0))
    assert world.look(T0, LOST, accepted=False) == [("firing", "llama")]
    assert world.look(T0 + 5, LOST, accepted=False) == [("firing", "llama")]
    assert world.look(T0 + 10, {}) == []
    assert world.look(T0 + 10 + SETTLED_S, {}) == []
    assert world.dropped == 1 and world.known == {}


def test_a_warning_that_becomes_an_error_is_told_at_once() -> None:
    world = World(target(after_s=0))
    key = NoticeKey("llama", "disk-nearly-full")
    assert world.look(T0, {key: alert(level="warning")}) == [("firing", "llama")]
    assert world.look(T0 + 1, {key: alert(level="error")}) == [("firing", "llama")]
    assert world.look(T0 + 2, {key: alert(level="warning")}) == []


def test_a_clock_that_is_set_back_holds_nothing_up() -> None:
    """What was seen or told in a future that never came is told now; a little less than a minute is another node's clock."""
    world = World(target(after_s=30, repeat_s=3600))
    assert world.look(T0 + 86_400, LOST) == []
    assert world.look(T0, LOST) == [("firing", "llama")]
    assert world.look(T0 - 50, LOST) == []
    assert world.look(T0 - 86_400, LOST) == [("firing", "llama")]
    assert world.look(T0 - 86_300, LOST) == []


def test_texts_are_cut_and_can_be_sent_whatever_they_are() -> None:
    """Each time that they are told, and not at the first time alone."""
    world = World(target(after_s=0))
    made = plan(world.target, {NoticeKey("a", "b"): alert(text="\ud800" * 9000)}, {}, {}, T0)
    for told in (*made.added, *made.firing):
        assert len(told.text) <= 6 * 2000 and as_alert("ops", told, False, None).model_dump_json()


def test_a_text_with_control_characters_does_not_keep_its_message_from_being_taken() -> None:
    """Mail servers refuse a NUL, and chats a message that has one: other alerts of the message would be told to nobody."""
    world = World(target(after_s=0))
    (told,) = plan(world.target, {NoticeKey("a", "b"): alert(text="x\0\x1b[2J\u202e\ny")}, {}, {}, T0).firing
    assert told.text == "x\\x00\\x1b[2J\\u202e\ny"


def test_never_again_and_no_recovery() -> None:
    world = World(target(after_s=0, repeat_s=0, recovery=False))
    assert world.look(T0, LOST) == [("firing", "llama")]
    assert world.look(T0 + 10**7, LOST) == []
    world.look(T0 + 10**7 + 1, {})
    assert world.look(T0 + 10**7 + 100, {}) == [] and world.known == {}


def test_patterns_and_levels() -> None:
    """Alerts about no run are for targets of all runs."""
    alerts = {
        NoticeKey("llama-1", "a"): alert("a"),
        NoticeKey("llama-2", "b"): alert("b", "warning"),
        NoticeKey("gpt", "a"): alert("a"),
        NoticeKey("", "node-lost"): alert("node-lost", "warning"),
    }
    for more, runs in (
        ({}, {"llama-1", "llama-2", "gpt", ""}),
        ({"runs": "llama-*"}, {"llama-1", "llama-2"}),
        ({"runs": "gpt"}, {"gpt"}),
        ({"level": "error"}, {"llama-1", "gpt"}),
    ):
        assert {run for _, run in World(target(after_s=0, **more)).look(T0, alerts)} == runs


def test_a_message_has_a_length_and_the_next_one_has_the_rest() -> None:
    """Errors first; nothing is lost."""
    world = World(target(after_s=0))
    alerts = {NoticeKey(f"run-{n}", "a"): alert(level="error" if n % 2 else "warning") for n in range(120)}
    turns = [world.look(T0 + n, alerts) for n in range(4)]
    assert [len(turn) for turn in turns] == [ALERTS_MAX, ALERTS_MAX, 20, 0]
    assert all(int(run[4:]) % 2 for _, run in turns[0])
    assert {run for turn in turns for _, run in turn} == {key.run for key in alerts}


def test_alerts_of_one_code_are_one() -> None:
    found = current([("a", alert(text="one", level="warning")), ("a", alert(text="two")), ("b", alert(text="three"))])
    assert {key.run: (item.level, item.text) for key, item in found.items()} == {
        "a": ("error", "one; two"),
        "b": ("error", "three"),
    }


def test_ids_are_the_same_after_a_restart_and_new_for_a_new_alert() -> None:
    told = NotifiedAlert(NoticeKey("llama", "run-died"), "error", "text", "hint", 5, T0, 0, T0)
    again = told._replace(text="another text", times=3, last=T0 + 9)
    assert alert_id("ops", told) == alert_id("ops", again)
    assert len({alert_id("ops", told), alert_id("other", told), alert_id("ops", told._replace(since=T0 + 0.001))}) == 3
    first, second = (as_alert("ops", one, False, "https://h") for one in (told, again))
    assert (first.url, first.since, first.told) == ("https://h/runs/llama", "2027-01-15T08:00:00.000Z", 0)
    assert notice_id("ops", [first]) == notice_id("ops", [as_alert("ops", told, False, None)]) != notice_id("ops", [second])


@given(
    st.lists(st.tuples(st.integers(1, 400), st.sets(st.sampled_from(["a", "b"])), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([0.0, 30.0]),
    st.sampled_from([0.0, 300.0]),
)
def test_whatever_happens_nobody_is_told_twice(
    probe: list[tuple[int, set[str], bool]], after_s: float, repeat_s: float
) -> None:
    """Over all histories: firing and over alternate but for repeats, which have their time between them."""
    world, now = World(target(after_s=after_s, repeat_s=repeat_s)), T0
    fires: dict[str, float] = {}
    for passed, runs, accepted in probe:
        now += passed
        told = world.look(now, {NoticeKey(run, "c"): alert("c") for run in runs}, accepted)
        if not accepted:
            continue
        for status, run in told:
            if status == "over":
                assert run in fires and run not in runs
                del fires[run]
                continue
            assert run in runs
            if run in fires:
                assert repeat_s and now - fires[run] >= repeat_s
            fires[run] = now
