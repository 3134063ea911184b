"""The order of compute, and the thread that keeps it."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.engine.compute_thread import ComputeThread, JobQueue, Turn, Work

turns = st.builds(
    Turn, work=st.sampled_from(Work), step=st.integers(0, 2), later_stage=st.integers(-3, 0), index=st.integers(0, 3)
)


def drain(queue: JobQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_inside_a_class_older_step_then_later_stage_then_lower_index_then_first_come() -> None:
    queue: JobQueue[str] = JobQueue()
    for name, turn in {
        "second index": Turn(Work.FORWARD, 4, -2, 1),
        "first index": Turn(Work.FORWARD, 4, -2, 0),
        "early stage": Turn(Work.FORWARD, 4, 0, 0),
        "next step": Turn(Work.FORWARD, 5, -2, 0),
        "first index again": Turn(Work.FORWARD, 4, -2, 0),
    }.items():
        queue.push(turn, name)
    assert drain(queue) == ["first index", "first index again", "second index", "early stage", "next step"]


def test_state_goes_first_and_then_the_older_step_with_all_its_work() -> None:
    queue: JobQueue[str] = JobQueue()
    for step in (4, 3):
        for work in (Work.WEIGHTS, Work.FORWARD, Work.BACKWARD, Work.STATE):
            queue.push(Turn(work, step, 0, 0), f"{work.name} {step}")
    order = ["BACKWARD", "FORWARD", "WEIGHTS"]
    assert drain(queue) == ["STATE 3", "STATE 4", *(f"{work} {step}" for step in (3, 4) for work in order)]


def test_too_many_deferred_weight_passes_go_before_forward_but_not_before_backward() -> None:
    queue: JobQueue[str] = JobQueue(max_deferred=2)
    for index in range(4):
        queue.push(Turn(Work.WEIGHTS, 0, 0, index), f"weights {index}")
    for index in range(2):
        queue.push(Turn(Work.FORWARD, 0, 0, index), f"forward {index}")
    queue.push(Turn(Work.BACKWARD, 0, 0, 9), "backward")
    assert drain(queue) == ["backward", "weights 0", "weights 1", "forward 0", "forward 1", "weights 2", "weights 3"]


@given(st.lists(turns, max_size=30), st.integers(0, 5))
def test_every_job_comes_out_once_and_each_class_in_order(pushed: list[Turn], max_deferred: int) -> None:
    queue: JobQueue[Turn] = JobQueue(max_deferred=max_deferred)
    for turn in pushed:
        queue.push(turn, turn)
    popped = [queue.pop() for _ in range(len(pushed))]
    assert len(queue) == 0
    for work in Work:
        of_class = [turn for turn in popped if turn.work is work]
        assert of_class == sorted((turn for turn in pushed if turn.work is work), key=lambda turn: turn.urgency)


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 4))
def test_forwards_without_end_leave_a_bounded_number_of_weight_passes(arrivals: list[bool], max_deferred: int) -> None:
    """Each forward that runs owes one weight pass; forwards are always queued."""
    queue: JobQueue[Work] = JobQueue(max_deferred=max_deferred)
    owed = 0
    for number, _ in enumerate(arrivals):
        queue.push(Turn(Work.FORWARD, 0, 0, number), Work.FORWARD)
        if queue.pop() is Work.FORWARD:
            queue.push(Turn(Work.WEIGHTS, 0, 0, number), Work.WEIGHTS)
            owed += 1
        else:
            owed -= 1
        assert owed <= max_deferred + 1


def test_an_empty_queue_says_so() -> None:
    with pytest.raises(IndexError):
        JobQueue[str]().pop()


FIRST = Turn(Work.FORWARD, 0, 0, 0)


async def test_jobs_run_on_one_thread_in_turn_and_return_or_raise() -> None:
    compute, gate, order = ComputeThread(), threading.Event(), []

    def job(name: str) -> str:
        order.append(name)
        return f"{name} on {threading.current_thread().name}"

    def fails() -> None:
        raise KeyError("mine")

    async with asyncio.TaskGroup() as group:
        group.create_task(compute.run(FIRST, gate.wait))
        await asyncio.sleep(0)
        forward = group.create_task(compute.run(FIRST, lambda: job("forward")))
        backward = group.create_task(compute.run(Turn(Work.BACKWARD, 0, 0, 0), lambda: job("backward")))
        await asyncio.sleep(0)
        gate.set()
    assert order == ["backward", "forward"]
    assert backward.result() == "backward on compute" and forward.result() == "forward on compute"
    with pytest.raises(KeyError, match="mine"):
        await compute.run(FIRST, fails)
    assert await compute.run(FIRST, lambda: 5) == 5, "an error does not end the thread"
    compute.close()


async def test_averaging_and_compute_do_not_wait_for_each_other() -> None:
    compute, gate = ComputeThread(), threading.Event()
    async with asyncio.TaskGroup() as group:
        computing = group.create_task(compute.run(FIRST, gate.wait))
        averaging = [
            group.create_task(compute.run(Turn(Work.ROUND, 0, 0, 0), lambda: threading.current_thread().name))
            for _ in range(2)
        ]
        await asyncio.wait(averaging)
        assert not computing.done()
        gate.set()
    assert [task.result() for task in averaging] == ["averaging", "averaging"]
    compute.close()


async def test_cancelling_drops_a_queued_job_and_lets_a_running_one_finish() -> None:
    compute, began, gate, ran = ComputeThread(), threading.Event(), threading.Event(), []

    def long() -> None:
        began.set()
        gate.wait()
        ran.append("long")

    running = asyncio.ensure_future(compute.run(FIRST, long))
    queued = asyncio.ensure_future(compute.run(FIRST, lambda: ran.append("queued")))
    await asyncio.to_thread(began.wait)
    running.cancel()
    queued.cancel()
    await asyncio.wait([running, queued])
    assert running.cancelled() and queued.cancelled()
    gate.set()
    await compute.run(FIRST, lambda: ran.append("last"))
    assert ran == ["long", "last"]
    compute.close()


async def test_closing_cancels_what_waits_and_refuses_what_comes() -> None:
    compute, began, gate = ComputeThread(), threading.Event(), threading.Event()

    def long() -> str:
        began.set()
        gate.wait()
        return "finished"

    running = asyncio.ensure_future(compute.run(FIRST, long))
    queued = asyncio.ensure_future(compute.run(FIRST, lambda: None))
    await asyncio.to_thread(began.wait)
    closing = asyncio.ensure_future(asyncio.to_thread(compute.close))
    await asyncio.wait([queued])
    assert queued.cancelled()
    gate.set()
    await closing
    assert await running == "finished"
    with pytest.raises(asyncio.CancelledError):
        await compute.run(FIRST, lambda: None)
    compute.close()


def test_a_loop_that_ended_first_does_not_end_the_thread() -> None:
    compute, gate, done = ComputeThread(), threading.Event(), threading.Event()

    async def leaves() -> None:
        waiting = asyncio.ensure_future(compute.run(FIRST, gate.wait))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(leaves())
    gate.set()

    async def comes() -> None:
        await compute.run(FIRST, done.set)

    asyncio.run(comes())
    assert done.is_set()
    compute.close()
