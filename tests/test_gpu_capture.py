"""What waits for what in a captured graph, told by streams and events that note it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from strata.gpu import doorbell
from strata.gpu.capture import Capture


class Stream:
    """Notes what a launch waits for: everything queued on it before, and on others before events it waited for."""

    def __init__(self, non_blocking=True):
        self.done: frozenset = frozenset()

    def wait_event(self, event):
        assert event.done is not None, "an event that was not recorded"
        self.done |= event.done


class Event:
    done = None

    def __init__(self, disable_timing):
        assert disable_timing

    def record(self, stream):
        self.done = stream.done


CUPY = SimpleNamespace(cuda=SimpleNamespace(Stream=Stream, Event=Event))
MAIN = (0, 0, False, False)


def before(*launches):
    """For each launch, given as (fork, branch, aside, gathers) or by names, the numbers of those it waits for."""
    named = [x if isinstance(x, dict) else dict(zip(("fork", "branch", "aside", "gathers"), x, strict=True))
             for x in launches]  # fmt: skip
    made = [replace(doorbell.stamp(64)[0], **x) for x in named]
    found: list[set] = []

    def function(number):
        def call(grid, block, args, shared_bytes, stream):
            found.append(set(stream.done))
            stream.done |= {number}

        return call

    main = Stream()
    capture = Capture(CUPY, main)
    capture.open_streams(made)
    capture.queue([(function(i), one) for i, one in enumerate(made)])
    assert main.done == set(range(len(made))), "at its end a captured stream has waited for all others"
    capture.close()
    return found


def test_branches_wait_for_the_fork_and_the_join_for_them():
    found = before(MAIN, (1, 0, False, False), (1, 0, False, False), (1, 1, False, False), (1, 2, False, False), MAIN)
    assert found == [set(), {0}, {0, 1}, {0}, {0}, {0, 1, 2, 3, 4}]


def test_a_fork_behind_a_fork():
    found = before((1, 0, False, False), (1, 1, False, False), (2, 0, False, False), (2, 1, False, False))
    assert found == [set(), set(), {0, 1}, {0, 1}]


def test_nothing_waits_for_what_is_aside_but_what_gathers():
    layer = ((1, 0, False, False), (1, 0, True, False), (1, 1, False, False), (1, 1, True, False))
    again = tuple((2, b, a, g) for _, b, a, g in layer)
    found = before(MAIN, *layer, MAIN, *again, MAIN, (0, 0, False, True))
    assert found[2] == {0, 1} and found[4] == {0, 3}, "it waits for its own branch"
    assert found[5] == {0, 1, 3} and found[10] == {0, 1, 3, 5, 6, 8}
    assert found[11] == set(range(11))
    assert found[7] == {0, 1, 2, 3, 5, 6}, "one branch's launches aside keep their order"


def test_launches_ahead_run_beside_forks_and_asides_until_they_are_met():
    ahead, meets = {"ahead": True}, {"meets": True}
    layer = ((1, 0, False, False), (1, 0, True, False), (1, 1, False, False))
    found = before(MAIN, ahead, ahead, MAIN, *layer, meets, MAIN)
    assert found[1] == {0} and found[2] == {0, 1}, "behind what stands in front of the first, one behind the other"
    assert found[3] == {0} and found[4] == {0, 3} and found[6] == {0, 3}
    assert found[7] == {0, 1, 2, 3, 4, 6} and found[8] == {0, 1, 2, 3, 4, 6, 7}


def test_what_is_ahead_and_never_met_is_waited_for_at_the_end():
    assert before(MAIN, {"ahead": True}, MAIN) == [set(), {0}, {0}]


def test_a_chain_ahead_may_follow_another():
    ahead, meets = {"ahead": True}, {"meets": True}
    found = before(MAIN, ahead, meets, ahead, MAIN, meets)
    assert found == [set(), {0}, {0, 1}, {0, 1, 2}, {0, 1, 2}, {0, 1, 2, 3, 4}]
