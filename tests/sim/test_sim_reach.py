"""Who can be called: pings that come back, and pairs of which only one can dial the other."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest

from swarmnet.errors import PeerGone, PeerTimeout
from swarmnet.ids import PeerId
from swarmnet.messages import Busy, Fetch, Fetched, Heartbeat
from swarmnet.testing.clock import SimulatedProcess, VirtualLoop
from swarmnet.testing.doubles import FakeService
from swarmnet.testing.links import Links
from swarmnet.testing.network import MemoryNetwork, Message
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Enough, VirtualSwarm
from tests.contracts.transport_contract import FETCH, HEARTBEAT

A, B = PeerId("a"), PeerId("b")


class Two:
    """Two peers in memory, and what they heard."""

    def __init__(self, *, b_answers: bool = True) -> None:
        self.loop = VirtualLoop()
        self.network = MemoryNetwork(self.loop, Links(), seed=1)
        self.a, self.b = FakeService(_fetched), FakeService(_fetched)
        self.network.attach(A, SimulatedProcess("a"), self.a)
        self.network.attach(B, SimulatedProcess("b"), self.b, answers=b_answers)

    def play(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Run it to its end."""
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(scenario)
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()

    async def beat(self, sender: PeerId, peer: PeerId) -> None:
        """One heartbeat, and time for an answer."""
        self.network.transport(sender).tell(peer, HEARTBEAT)
        await asyncio.sleep(1.0)

    async def fetch(self, sender: PeerId, peer: PeerId) -> list[object]:
        """One call's answers."""
        deadline = self.loop.time() + 60.0
        return [answer async for answer in self.network.transport(sender).call(peer, FETCH, deadline=deadline)]


async def _fetched(caller, request, payload):
    yield Fetched()


def test_who_cannot_be_dialled_is_told_on_its_own_links_and_called_by_nobody() -> None:
    two = Two()

    async def scenario() -> None:
        two.network.lines.block_dial(A, B)
        await two.beat(A, B)
        assert two.b.told.get_nowait() == (A, HEARTBEAT) and two.a.reached.empty()
        await two.beat(B, A)
        assert two.a.told.get_nowait() == (B, HEARTBEAT) and two.b.reached.get_nowait() == A
        assert await two.fetch(B, A) == [Fetched()]
        with pytest.raises(PeerGone, match="silence") as caught:
            await two.fetch(A, B)
        assert not caught.value.definite and two.loop.time() > 10.0
        two.network.heal()
        assert await two.fetch(A, B) == [Fetched()]
        await two.beat(A, B)
        assert two.a.reached.get_nowait() == B

    two.play(scenario())


def test_the_death_of_one_who_cannot_be_dialled_is_no_certainty() -> None:
    two = Two()

    async def scenario() -> None:
        two.network.lines.block_dial(A, B)
        two.network.kill(B)
        assert await two.a.gone.get() == (B, False)
        await two.beat(A, B)
        assert two.a.gone.empty(), "a dropped packet says nothing"

    two.play(scenario())


def test_a_stopped_process_answers_when_it_goes_on_and_some_never_answer() -> None:
    two = Two()

    async def scenario() -> None:
        two.network.stop(B)
        await two.beat(A, B)
        assert two.a.reached.empty()
        two.network.resume(B)
        await asyncio.sleep(1.0)
        assert two.a.reached.get_nowait() == B

        two.network.transport(A).tell(B, HEARTBEAT)
        two.network.stop(A)
        await asyncio.sleep(1.0)
        assert two.a.reached.empty(), "who is stopped hears of it when it goes on"
        two.network.resume(A)
        await asyncio.sleep(1.0)
        assert two.a.reached.get_nowait() == B

    two.play(scenario())
    mute = Two(b_answers=False)

    async def unanswered() -> None:
        await mute.beat(A, B)
        assert mute.b.told.get_nowait() == (A, HEARTBEAT) and mute.a.reached.empty()

    mute.play(unanswered())


def test_a_replica_is_out_of_touch_with_one_that_it_cannot_call() -> None:
    swarm = VirtualSwarm(Plan(stages=2, replicas=2, microbatches=4, steps=200), seed=1)
    out: set[tuple[PeerId, PeerId]] = set()

    async def script(swarm: VirtualSwarm) -> None:
        one, two = swarm.replicas(0)
        swarm.block_dial(one, two)
        await asyncio.sleep(5.0)
        for node in swarm.nodes:
            view = node.peer.replicas[node.stages[0]].member.view
            out.update((node.peer_id, other) for other in view.out_of_touch)
        raise Enough

    swarm.run(until_s=120.0, script=script)
    assert out == {("s0.0", "s0.1")}


def test_messages_are_lost_and_answers_replaced_as_the_intercepts_say() -> None:
    two, beats = Two(), itertools.count()
    busy = Busy(1.0, version=2)

    def intercept(sender: PeerId, receiver: PeerId, message: Message) -> Message | bool | None:
        if isinstance(message, Heartbeat):
            return next(beats) != 1
        return busy if isinstance(message, Fetched) else None

    two.network.intercepts.append(intercept)

    async def scenario() -> None:
        for heard in (1, 1, 2):
            await two.beat(A, B)
            assert two.b.told.qsize() == heard, "the second one is lost"
        assert await two.fetch(A, B) == [busy]
        two.network.intercepts.append(lambda sender, receiver, message: not isinstance(message, Fetch))
        with pytest.raises(PeerTimeout):
            await two.fetch(A, B)

    two.play(scenario())
