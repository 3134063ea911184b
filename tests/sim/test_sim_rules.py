"""What faults do to a virtual swarm: rules of links that overlap, who is meant by a name, and which ends are kills."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from chaos import Chaos, Drawn, play
from strike import happened
from test_sim_fleet import small

from swarmnet.ids import PeerId
from swarmnet.messages import HistoryRequest, Running
from swarmnet.simulate.fleet_run import FleetSimulation
from swarmnet.testing.clock import SimulatedProcess
from swarmnet.testing.doubles import FakeService, run_virtual
from swarmnet.testing.fault import Fault, Join, Kill, OneWayCut, Partition, Slow
from swarmnet.testing.links import Links
from swarmnet.testing.network import MemoryNetwork
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Enough, VirtualSwarm

ONE, TWO, THREE, FOUR = map(PeerId, ("s0.0", "s0.1", "s1.2", "s1.3"))
STAGES = Partition(step=0, for_s=1.0, between=(("s0",), ("s1",)))
DEAF = OneWayCut(step=0, for_s=1.0, senders=("s0.0",), receivers=("s0.1", "s1"))


def slow(bytes_per_s: float, latency_s: float) -> Fault:
    return Slow(step=0, for_s=1.0, peers=("s0.0",), bytes_per_s=bytes_per_s, latency_s=latency_s)


@pytest.fixture
def during() -> Callable[[Callable[[VirtualSwarm], None]], None]:
    """Look at a swarm of two stages of two while it runs."""

    def run(look: Callable[[VirtualSwarm], None]) -> None:
        async def script(swarm: VirtualSwarm) -> None:
            look(swarm)
            raise Enough

        assert not VirtualSwarm(Plan(steps=1), 1).run(script=script)

    return run


def test_a_cut_ends_by_itself_and_no_other_with_it(during: Any) -> None:
    def look(swarm: VirtualSwarm) -> None:
        lines = swarm.network.lines
        swarm.cut(STAGES)
        swarm.cut(DEAF)
        assert not lines.reaches(THREE, ONE) and not lines.reaches(ONE, TWO) and lines.reaches(TWO, ONE)
        swarm.heal(STAGES)
        assert lines.reaches(THREE, ONE), "healed"
        assert not lines.reaches(ONE, TWO) and not lines.reaches(ONE, THREE), "the other cut holds"
        swarm.heal(DEAF)
        assert lines.reaches(ONE, TWO) and not lines.cuts

    during(look)


def test_a_stage_means_all_that_serve_it_whatever_they_are_called_and_who_joins_it(during: Any) -> None:
    def look(swarm: VirtualSwarm) -> None:
        swarm.cut(STAGES)
        newcomer = swarm.add((1,)).peer_id
        for sender in (ONE, TWO):
            assert not any(swarm.network.lines.reaches(sender, other) for other in (THREE, FOUR, newcomer))
        assert swarm.network.lines.reaches(THREE, newcomer)
        assert swarm.network.lines.reaches(ONE, PeerId("trainer.0")), "who is in no group reaches everybody"

    during(look)


def test_of_slow_links_the_slowest_counts_and_a_cut_that_heals_ends_none(during: Any) -> None:
    def look(swarm: VirtualSwarm) -> None:
        lines = swarm.network.lines

        def rates() -> tuple[float | None, ...]:
            return tuple(found.bytes_per_s if (found := way.get(ONE)) else None for way in (lines._up, lines._down))

        swarm.limit(ONE, up_bytes_per_s=500.0)
        first, second = slow(1000.0, 0.1), slow(2000.0, 0.3)
        swarm.cut(first)
        swarm.cut(second)
        swarm.cut(STAGES)
        assert lines.held_s == {ONE: 0.3} and rates() == (500.0, 1000.0), "never faster than its own line"
        swarm.heal(STAGES)
        swarm.heal(first)
        assert lines.held_s == {ONE: 0.3} and rates() == (500.0, 2000.0)
        swarm.heal(second)
        assert not lines.held_s and rates() == (500.0, None)

    during(look)


def test_intercepts_see_an_answer_once_also_when_it_waits_for_a_cut_to_heal() -> None:
    async def answers() -> list[str]:
        network, seen = MemoryNetwork(asyncio.get_running_loop(), Links(), 1), list[str]()  # type: ignore[arg-type]
        for peer in (ONE, TWO):
            service = FakeService(lambda *_: [0.5, Running()])
            network.attach(peer, SimulatedProcess(peer), service)  # type: ignore[arg-type]
        network.intercepts.append(lambda sender, receiver, message: seen.append(type(message).__name__))  # type: ignore[func-returns-value]

        async def call() -> None:
            async for answer in network.transport(ONE).call(TWO, HistoryRequest(), deadline=60.0):
                assert answer == Running()

        calling = asyncio.ensure_future(call())
        await asyncio.sleep(0.2)
        network.lines.cut("cut", [[ONE], [TWO]])
        network.lines.cut("another", [[ONE], [TWO]])
        await asyncio.sleep(1.0)
        network.heal("another")
        assert not calling.done(), "one cut holds"
        network.heal("cut")
        await calling
        return seen

    assert run_virtual(answers()) == ["HistoryRequest", "Running"]


def test_replicas_that_parted_behind_a_cut_meet_after_it_heals_also_after_the_last_step() -> None:
    """Two of a stage, each a numerics class of its own, are cut off from each other until both are done."""
    plan = Plan(stages=2, replicas=2, microbatches=8, steps=8, forward_s=0.1, classes=0)
    cuts = (
        Drawn("cut", at_s=12.017, seconds=4.416, pick=0.6698255595592497, variant=0.35297051119014544),
        Drawn("cut", at_s=17.065, seconds=39.143, pick=0.5346837414708775, variant=0.13031535015865903),
    )
    swarm = play(plan, Chaos(until_s=60.0, cut_s=8.0, longest_cut_s=40.0), 1000, cuts, end_s=400.0)
    assert swarm.loop.time() > 56.25, "it was not over when the cut healed"


def test_a_farewell_is_no_kill_and_who_gives_up_does_not_come_back() -> None:
    gone: list[tuple[str, bool]] = []

    async def script(swarm: VirtualSwarm) -> None:
        swarm.on_gone = lambda peer, back: gone.append((peer, back))
        await happened(swarm, "applied", version=2)
        swarm.drain(ONE)
        for node in swarm.nodes:
            swarm.block_dial(node, PeerId("hermit"))
        swarm.add((1,), "hermit")
        await happened(swarm, "unreachable", peer=PeerId("hermit"))
        swarm.heal()

    swarm = VirtualSwarm(Plan(replicas=3, steps=60), 1)
    swarm.run(script=script)
    assert sorted(gone) == [("hermit", False), (ONE, True)]
    assert swarm.counts["given_up"] == 1 and not swarm.counts["kills"]


def test_a_schedule_hears_of_a_start_when_the_process_is_there() -> None:
    faults = (Kill(stage=0, step=1, back_s=0.5), Join(stage=1, step=1))
    simulation = FleetSimulation(replace(small(steps=3), faults=faults))
    started, heard = list[str](), simulation._schedule.started

    def hear(name: str, *, now: float) -> Any:
        node = simulation.swarm.last[simulation.swarm.ids[name]]
        assert node.up and node.began_at == now
        started.append(name)
        return heard(name, now=now)

    simulation._schedule.started = hear  # type: ignore[method-assign]
    assert simulation.run() and len(started) == 2
