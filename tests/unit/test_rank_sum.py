"""The peer process's side of ranks, with ranks that a test kills when it likes: sums, keys, restarts, patience."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage, DeviceFull, MeshFailed, RankLost, Refused, RejectCode
from swarmnet.ranks.backend import RankSum, SumReading
from swarmnet.ranks.supervisor import RankSupervisor, RestartBackoff

PATIENCE_S = 30.0
QUICK = RestartBackoff(restarts=2, pause_s=0.0)


class Group:
    """`RankGroup` as a list of orders. dies: before which order of that name, or at "start" or "check". wrote: called
    at each sum that ranks write."""

    def __init__(self) -> None:
        self.epoch, self.pids = 0, (7, 8)
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.dies: list[str] = []
        self.holds: set[int] = set()
        self.refuses: Exception | None = None
        self.closed = False
        self.words = ""
        self.wrote: Callable[[int], object] = lambda step: None

    def _fate(self, name: str) -> None:
        if name in self.dies:
            self.dies.remove(name)
            self.holds.clear()
            raise RankLost(1, f"rank 1 died in {name}{self.words}")

    def start(self) -> None:
        self.epoch += 1
        self._fate("start")

    def check(self) -> None:
        self._fate("check")

    def order(self, name: str, /, forgotten: list[int], **fields: Any) -> list[Mapping[str, Any]]:
        self._fate(name)
        self.holds -= set(forgotten)
        if self.refuses is not None:
            raise self.refuses
        if name == "load":
            self.holds.clear()
        self.orders.append((name, fields))
        if name == "write_sum":
            self.wrote(fields["step"])
        return [{}, {}]

    def close(self) -> None:
        self.closed = True


class Told:
    """What is told."""

    def __init__(self) -> None:
        self.sums: list[RankSum] = []
        self.said: list[str] = []

    def lost(self) -> None:
        for total in self.sums:
            total.lose()
        self.said.append("lost")

    def event(self, event: str, fields: dict[str, object]) -> None:
        self.said.append(event)


class Table:
    """Ranks and two sums over them. What ranks write is how often they were told to add, in every element."""

    def __init__(self, backoff: RestartBackoff = QUICK) -> None:
        self.group, self.losses = Group(), Told()
        self.ranks = RankSupervisor(
            self.group,
            self.losses.lost,
            self.losses.event,
            label="tp2",
            load=lambda: {"version": 3},
            backoff=backoff,  # type: ignore
        )
        self.reading = SumReading(torch.zeros(3))
        self.sums = self.losses.sums = [RankSum(self.ranks, self.reading) for _ in range(2)]
        self.group.wrote = lambda step: self.reading.flat.fill_(len(self.sums[step % 2].indexes(step)))

    def add(self, step: int, index: int) -> bool:
        total, ordered = self.sums[step % 2], functools.partial(self.ranks.order, "accumulate", finishes=True)
        return total.count(ordered, step=step, index=index, discards=total.discards)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.group.orders]


def refused(call: Any) -> None:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.code is RejectCode.NOT_READY


def test_ranks_are_started_once_and_read_the_state_first() -> None:
    table = Table()
    table.ranks.order("forward")
    table.ranks.start()
    assert table.names == ["load", "forward"] and table.losses.said == ["mesh_started"]


def test_a_sum_is_written_once_per_content() -> None:
    table = Table()
    assert table.add(0, 5) and not table.add(0, 5)
    assert table.sums[0].read(0).tolist() == [1.0] * 3 == table.sums[0].read(0).tolist()
    assert table.names.count("write_sum") == 1
    assert table.add(0, 6) and table.sums[0].read(0).tolist() == [2.0] * 3
    assert table.add(1, 0) and table.sums[1].read(1).tolist() == [1.0] * 3
    assert table.sums[0].read(0).tolist() == [2.0] * 3
    assert table.names.count("write_sum") == 4
    assert table.sums[0].read(2).tolist() == [0.0] * 3 and table.names.count("write_sum") == 4


def test_what_is_written_is_read_while_ranks_are_at_another_order() -> None:
    """By a round's thread, piece by piece: it would wait for a forward or backward for each."""
    table = Table()
    assert table.add(0, 5) and table.sums[0].read(0).tolist() == [1.0] * 3
    with table.ranks.lock, ThreadPoolExecutor(1) as round_thread:
        assert round_thread.submit(table.sums[0].read, 0).result(PATIENCE_S).tolist() == [1.0] * 3


@pytest.mark.parametrize("change", ["add", "discard", "lose", "lose and discard", "the other sum"])
def test_what_is_written_is_read_only_as_long_as_it_stands(change: str) -> None:
    """Neither a sum that has grown, nor one that is gone."""
    table = Table()
    total = table.sums[0]
    assert table.add(0, 5) and any(total.read(0))
    match change:
        case "add":
            table.add(0, 6)
        case "discard":
            total.discard()
        case "lose" | "lose and discard":
            total.lose()
            if change == "lose and discard":
                total.discard()
        case "the other sum":
            table.add(1, 0)
            table.sums[1].read(1)
    if change == "lose":
        refused(lambda: total.read(0))
    else:
        counted = {"add": 2.0, "the other sum": 1.0}.get(change, 0.0)
        assert total.read(0).tolist() == [counted] * 3


def test_a_write_that_breaks_off_leaves_nothing_to_read() -> None:
    table = Table()
    assert table.add(0, 5) and table.add(1, 0) and any(table.sums[0].read(0))
    whole = table.group.wrote

    def torn(step: int) -> None:
        table.reading.flat[0] = 9.0
        raise DeviceFull("half of it")

    table.group.wrote = torn
    with pytest.raises(DeviceFull):
        table.sums[1].read(1)
    table.group.wrote = whole
    assert table.sums[0].read(0).tolist() == [1.0] * 3


def test_what_ranks_refuse_alike_is_not_counted() -> None:
    table = Table()
    table.ranks.start()
    table.group.refuses = BadMessage(RejectCode.NON_FINITE, "inf")
    with pytest.raises(BadMessage):
        table.add(0, 1)
    table.group.refuses = None
    assert table.sums[0].indexes(0) == frozenset() and table.add(0, 1)


@pytest.mark.parametrize("dies", ["accumulate", "check", "write_sum"])
def test_a_lost_sum_is_refused_until_it_is_discarded(dies: str) -> None:
    table = Table()
    assert table.add(0, 1)
    total, discards = table.sums[0], table.sums[0].discards
    table.group.dies = [dies]
    if dies == "check":  # found dead before the order, which the next ranks do for nothing
        assert not table.add(0, 2)
    else:
        refused(lambda: table.sums[0].read(0) if dies == "write_sum" else table.add(0, 2))
    assert total.discards == discards + 1 and table.losses.said[-2:] != [] and "lost" in table.losses.said
    refused(lambda: total.read(0))
    assert total.read(2).tolist() == [0.0] * 3  # another step's
    total.discard()
    assert total.read(0).tolist() == [0.0] * 3 and total.indexes(0) == frozenset()
    assert table.add(0, 1) and total.read(0).tolist() == [1.0] * 3


def test_a_sum_whose_ranks_are_found_dead_as_it_is_written_is_not_read_from_others() -> None:
    table = Table()
    assert table.add(0, 1)
    table.group.dies = ["check"]  # noticed before the order, and started again
    refused(lambda: table.sums[0].read(0))
    assert table.names[-2:] == ["load", "write_sum"] and table.reading.holds is None


def test_a_sum_whose_ranks_are_replaced_before_it_is_written_is_not_read_from_others() -> None:
    """By another thread's order: those that are up then hold nothing of it."""
    table = Table()
    assert table.add(0, 1)

    class Replaced:
        def __enter__(self) -> None:
            table.group.dies = ["check"]
            table.ranks.start()

        def __exit__(self, *_: object) -> None:
            pass

    table.reading.lock = Replaced()  # type: ignore[assignment]
    refused(lambda: table.sums[0].read(0))
    assert table.reading.holds is None


def test_nothing_is_lost_that_was_not_there() -> None:
    table = Table()
    table.group.dies = ["start", "load"]
    table.ranks.start()
    assert table.losses.said == ["rank_lost", "rank_lost", "mesh_started"]


def test_what_needs_no_sum_is_done_by_the_next_ranks() -> None:
    table = Table(RestartBackoff(pause_s=0.0))
    table.ranks.start()
    table.group.dies = ["check", "update", "start"]
    table.ranks.order("update", repeat=True, version=3)
    assert table.names == ["load", "load", "load", "update"] and table.losses.said.count("lost") == 2


def test_they_are_given_up_after_losses_with_nothing_in_between() -> None:
    table = Table()
    for _ in range(4):  # not in a row: something was finished
        table.group.dies = ["forward"]
        refused(lambda: table.ranks.order("forward"))
        table.ranks.order("forward", finishes=True)
    table.group.dies = ["forward", "load", "start"]
    refused(lambda: table.ranks.order("forward"))
    with pytest.raises(MeshFailed, match=r"\(tp2\) were started 3 times and finished nothing; .*died in load"):
        table.group.dies = ["start", "load"]
        table.ranks.start()
    refused(lambda: table.ranks.order("forward"))
    refused(lambda: table.ranks.order("update", repeat=True))


def test_an_order_that_always_kills_ranks_is_not_made_good_by_others() -> None:
    """Memory that is short in nothing but writing a sum, say: microbatches are counted, and no step ever ends."""
    table = Table()
    for _ in range(3):
        assert table.add(0, 1)
        table.group.dies = ["write_sum"]
        refused(lambda: table.sums[0].read(0))
        table.sums[0].discard()
    with pytest.raises(MeshFailed, match=r"\(tp2\) were lost 3 times in the order 'write_sum'.*died in write_sum"):
        table.ranks.start()
    assert table.losses.said[-1] != "mesh_started"


def test_an_order_that_kills_ranks_now_and_then_is_done_in_the_end() -> None:
    table = Table()
    for _ in range(5):
        table.ranks.start()
        table.group.dies = ["update", "update"]
        table.ranks.order("update", repeat=True, finishes=True)
    assert table.losses.said.count("lost") == 10


def test_who_is_closed_starts_nothing() -> None:
    table = Table()
    table.ranks.close()
    with pytest.raises(MeshFailed, match="stopped for good"):
        table.ranks.start()
    assert table.group.closed and table.group.epoch == 0


@given(st.lists(st.sampled_from(["hold", "forget", "order", "die", "load"]), max_size=40))
def test_ranks_hold_nothing_that_nobody_holds(acts: list[str]) -> None:
    """Whatever ends: a handle that dies, ranks, a state that is replaced."""
    table = Table(RestartBackoff(restarts=1000, pause_s=0.0))
    ranks, group, alive, key = table.ranks, table.group, [], 0
    ranks.start()
    for act in acts:
        match act:
            case "hold":
                ranks.order("forward")
                group.holds.add(key)
                alive.append(key)
                key += 1
            case "forget" if alive:
                ranks.forget(alive.pop())
            case "die":
                group.dies = ["check"]
                ranks.start()
            case "load":
                ranks.reload()
            case "order":
                ranks.order("forward")
    while alive:
        ranks.forget(alive.pop())
    ranks.order("forward")
    assert not group.holds


# ---------------------------------------------------------------- patience


def test_pauses_grow_from_nothing() -> None:
    backoff = RestartBackoff()
    assert [backoff.pause(losses) for losses in range(6)] == [0.0, 0.0, 0.25, 0.5, 1.0, 2.0]


def idle_deaths(table: Table, times: int) -> None:
    for _ in range(times):
        table.group.dies = ["check"]
        table.ranks.start()


def test_losses_are_forgotten_after_minutes_without_one() -> None:
    """Ranks with nothing to do finish nothing."""
    table = Table(RestartBackoff(restarts=5, pause_s=0.0, forget_s=0.0))
    table.ranks.start()
    idle_deaths(table, 50)
    table = Table(RestartBackoff(restarts=5, pause_s=0.0, forget_s=300.0))
    table.ranks.start()
    idle_deaths(table, 5)
    with pytest.raises(MeshFailed, match="were started 6 times and finished nothing"):
        idle_deaths(table, 1)


def test_time_does_not_excuse_an_order_that_always_kills_them() -> None:
    """It may hang until its deadline, or come after half an hour of microbatches."""
    table = Table(RestartBackoff(restarts=2, pause_s=0.0, forget_s=0.0))
    for _ in range(3):
        table.ranks.order("forward", finishes=True)
        table.group.dies = ["write_sum"]
        refused(lambda: table.ranks.order("write_sum"))
    with pytest.raises(MeshFailed, match="'write_sum'"):
        table.ranks.start()


def test_ranks_without_memory_are_full_and_start_again_with_less_in_them() -> None:
    table = Table()
    table.ranks.order("forward")
    table.group.words, table.group.dies = ": torch.OutOfMemoryError: CUDA out of memory.", ["forward"]
    with pytest.raises(DeviceFull, match="OutOfMemoryError"):
        table.ranks.order("forward")
    assert table.losses.said == ["mesh_started", "lost", "rank_lost"]
    table.ranks.order("forward")
    table.group.dies = ["update"] * 3
    with pytest.raises(DeviceFull, match="finished"):
        while True:
            table.ranks.order("update", repeat=True)


def test_ranks_that_cannot_start_for_want_of_memory_are_not_started_again() -> None:
    for name in ("start", "load"):
        table = Table()
        table.group.words, table.group.dies = ": torch.OutOfMemoryError: CUDA out of memory.", [name] * 5
        with pytest.raises(DeviceFull):
            table.ranks.start()
        assert table.group.epoch == 1, name
