"""What a plan adds up, and how sizes are read and shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.plan.memory import GIB, RankMemory, StageMemory, read_size, shown, together

SIZES = st.integers(0, 10**6)


def rank(held: int, microbatch: int, update: int = 0) -> RankMemory:
    return RankMemory(10, 20, 30, 40, update=update, held=held, microbatch=microbatch, offloaded=0)


@given(SIZES, SIZES, st.integers(1, 50))
def test_each_further_microbatch_takes_what_one_holds(held: int, over: int, count: int) -> None:
    found = rank(held, held + over)
    assert found.peak(count + 1) - found.peak(count) == held
    assert found.peak(0) == found.state == 100


def test_a_job_is_a_microbatch_or_an_update_whichever_takes_more() -> None:
    assert rank(5, 7).peak(2) == 100 + 2 * 5 + 2
    assert rank(5, 7, update=30).peak(2) == 100 + 2 * 5 + 30


def staged(stage: int, held: int, microbatch: int, ranks: int, *, on_host: bool) -> StageMemory:
    return StageMemory(stage, range(1), ranks, rank(held, microbatch), {"memo": 1000}, 2, on_host)


@pytest.mark.parametrize("on_host", [False, True])
def test_stages_of_one_process_compute_one_at_a_time_and_those_of_ranks_have_processes(on_host: bool) -> None:
    lasting, memo = 2 * 100 + 2 * 5 + 2 * 9, 2000 * on_host
    for ranks, need in ((1, lasting + max(50 - 5, 20 - 9)), (2, (1 + on_host) * (lasting + (50 - 5) + (20 - 9)))):
        plans = [staged(0, 5, 50, ranks, on_host=on_host), staged(1, 9, 20, ranks, on_host=on_host)]
        assert together(plans) == need + memo


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
def test_together_stages_need_more_than_alone_and_no_more_than_all_alone(
    sizes: list[tuple[int, int, int]], ranks: int, on_host: bool
) -> None:
    plans = [
        staged(stage, max(stash, owed), max(stash, owed) + over, ranks, on_host=on_host)
        for stage, (stash, owed, over) in enumerate(sizes)
    ]
    alone = [together([plan]) for plan in plans]
    assert max(alone) <= together(plans) <= sum(alone)
    assert together(plans[:1]) == alone[0]


def test_sizes_are_read_and_shown_in_three_digits() -> None:
    read = {"24GiB": 24 * GIB, "24 gib": 24 * GIB, "80g": 80 * GIB, "1.5GiB": 3 * GIB // 2, "24GB": 24 * 10**9}
    read |= {"512MiB": 2**29, "1024 B": 1024, "7B": 7}
    assert {text: read_size(text) for text in read} == read
    for text in ("", "GiB", "much", "-3GiB", "0GiB", "24", "1073741824", "0.5", "24GiBs", "1e99GiB", "nan"):
        with pytest.raises(ValueError):
            read_size(text)
    told = {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 24 * GIB: "24.0 GiB", GIB - 1: "1.00 GiB", 100 * GIB: "100 GiB"}
    told |= {int(9.994 * GIB): "9.99 GiB", int(9.996 * GIB): "10.0 GiB"}
    assert {size: shown(size) for size in told} == told
