"""Microbatches around a replica that is about to leave: it gets nothing new, and finishes and answers what it has."""

from __future__ import annotations

import asyncio

import pytest
from test_caller import CHECK, PAYLOAD, REQUEST, NextReplicas, gradient
from test_execution import inputs, payload, scene

from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Busy, Fetch, Fetched, Gradient, MovedTo, Process
from swarmnet.pipeline.caller import Caller
from swarmnet.pipeline.router import Router
from swarmnet.testing.doubles import FakeTransport, run_virtual
from swarmnet.transport import ReadPayload, layout_of

TIMERS = Timers()

pytestmark = pytest.mark.virtual_time


def call(leaving: set[str], **peers) -> tuple[list[str], list[str]]:
    """(whom one microbatch was sent to, whom it had to leave) when these candidates are leaving."""
    transport = FakeTransport(**peers)
    stage = NextReplicas(dict.fromkeys(map(PeerId, peers), 0), frozenset(map(PeerId, leaving)))

    async def main() -> None:
        caller = Caller(transport, Router(TIMERS), stage, CHECK)
        assert await caller.process(REQUEST, PAYLOAD) == gradient()

    run_virtual(main())
    return transport.asked, [peer for peer, _ in stage.rerouted_from]


def answers(request: Process) -> Gradient:
    return gradient()


def test_nobody_leaving_is_chosen_while_another_can() -> None:
    assert call({"a"}, a=answers, b=answers) == (["b"], [])
    assert call({"a", "b"}, a=answers, b=answers, c=answers) == (["c"], [])


def test_when_all_are_leaving_they_are_asked_all_the_same() -> None:
    assert call({"a", "b"}, a=answers, b=answers) == (["a"], [])
    assert call({"a"}, a=answers) == (["a"], [])


def test_an_owner_that_is_leaving_is_followed_and_not_hedged() -> None:
    asked: list[Process] = []

    def owner(request: Process) -> Gradient:
        asked.append(request)
        return gradient()

    assert call({"a"}, a=owner, b=lambda request: MovedTo("a")) == (["b", "a"], [])
    assert asked == [REQUEST]


@pytest.mark.parametrize("purpose", ["train", "eval"])
async def test_it_begins_nothing_new_and_says_when_to_come_back(purpose: str) -> None:
    async with scene(1) as here:

        async def unread() -> tuple[()]:
            raise AssertionError("the payload is not read")

        here.execution.leaving = True
        request = Process(0, 1, 5, purpose=purpose)
        sent = payload(1) if purpose == "train" else inputs(1)
        upload = ReadPayload(layout_of(sent), unread)
        told = [answer async for answer in here.execution.process("b", request, upload)]
        assert len(told) == 1 and isinstance(told[0], Busy) and told[0].retry_after_s >= 1.0
        assert here.execution.executions == 0 and not here.said
        here.execution.leaving = False
        assert isinstance(await here.ask(5, payload(1)), Gradient)


async def test_what_is_at_work_is_finished_and_answered_to_everybody_who_attaches() -> None:
    async with scene(1) as here:
        first = asyncio.ensure_future(here.ask(0, payload(1)))
        await asyncio.sleep(0.01)
        here.execution.leaving = True
        assert isinstance(await here.ask(0, payload(1)), Gradient) and isinstance(await first, Gradient)
        await asyncio.sleep(1.0)
        assert here.execution.executions == 1 and ("added", 0) in here.said
        assert isinstance(await here.ask(0, payload(1)), Gradient), "remembered"
        found = [answer async for answer in here.execution.fetch(Fetch(0, 1, 0, "gradient", cached=True))]
        assert isinstance(found[-1], Fetched)


async def test_who_waits_at_the_door_is_turned_away_too() -> None:
    async with scene(1) as here:
        calls = [asyncio.ensure_future(here.ask(index, payload(1))) for index in range(3)]  # two slots
        await asyncio.sleep(0.01)
        here.execution.leaving = True
        assert [type(await call) for call in calls] == [Gradient, Gradient, Busy]
