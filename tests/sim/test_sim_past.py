"""A past that the run has given up leads nobody: no copy of it, no sum, no job in the engine, and no lie about it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from further import further
from strike import node_of, until, watched
from test_sim_restart import reached

from swarmnet.averaging.exchange import Exchange
from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import PeerId, Restart
from swarmnet.messages import Answer, Commit, Finished, Round, TrailRequest, TrailStep
from swarmnet.state.disk import Written
from swarmnet.step.member import Member
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import SimulatedEngine
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

JOINER = PeerId("joiner")
STATE_BYTES = 200_000


def plan(*, replicas: int = 1, steps: int = 22) -> Plan:
    return Plan(
        stages=2,
        replicas=replicas,
        microbatches=4,
        steps=steps,
        checkpoint_every=4,
        forward_s=0.05,
        state_bytes=STATE_BYTES,
        piece_bytes=5000,
    )


def member(node: Node) -> Member:
    return node.peer.replicas[node.stages[0]].member


def lose_checkpoints(swarm: VirtualSwarm, node: Node, *, after: int) -> None:
    """The newer files of a dead peer's disk are gone: the run can only go back further than it had to."""
    disk = swarm.disks[node.peer_id]
    disk.files = {at: file for at, file in disk.files.items() if at[1] <= after}


def synced(swarm: VirtualSwarm, peer: PeerId, *, under: Restart) -> list[float]:
    """When a peer came to serve under that restart."""
    began = next(
        at for at, who, event, f in swarm.events if event == "restart" and who == peer and f["number"] == under.number
    )
    return [at for at, who, event, _ in swarm.events if event == "synced" and who == peer and at >= began]


@pytest.mark.parametrize("transfer_s", [20, *further(17, 23)])
def test_half_a_copy_of_a_past_that_was_given_up_is_not_completed(transfer_s: int) -> None:
    """The run goes back while somebody fetches, so slowly that the donor still has the copy when it has gone back."""
    swarm = watched(plan())

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 18)
        donor, other = swarm.replicas(0)[0], swarm.replicas(1)[0]
        swarm.limit(donor, up_bytes_per_s=STATE_BYTES / transfer_s)
        swarm.add((0,), JOINER)
        await asyncio.sleep(1.0)
        swarm.kill(other)
        lose_checkpoints(swarm, other, after=12)
        await asyncio.sleep(0.5)
        swarm.add((1,), other.peer_id)

    swarm.run(script=script, until_s=150.0)
    assert swarm.counts["restart"] and swarm.counts["fetching_again"] == 0
    arrived = next(
        at for at, who, event, f in swarm.events if event == "restart" and who == JOINER and f["number"] == 1
    )
    before, since = (
        [
            f["version"]
            for at, who, event, f in swarm.events
            if event == "fetching" and who == JOINER and (at > arrived + 0.1) is later
        ]
        for later in (False, True)
    )
    assert set(before) == {19} and since and since[0] in (12, 13), "what came by halves before is thrown away"
    first = synced(swarm, JOINER, under=Restart(1, 12))[0]
    assert first - arrived < 1.5 * transfer_s, "one copy, of the present, is what it takes"


def test_a_joiner_is_not_led_along_the_past_that_was_given_up() -> None:
    """Its donor had kept sums of that past for somebody else who was on the way."""
    swarm = watched(plan())

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 5)
        early = swarm.add((0,), "early")
        await reached(swarm, 18)
        donor, other = swarm.replicas(0)[0], swarm.replicas(1)[0]
        trail = donor.peer.replicas[0].exchange.replay_log
        trail.wanted()
        assert trail._kept
        swarm.kill(other)
        swarm.kill(early)
        swarm.disks[early.peer_id].files.clear()
        lose_checkpoints(swarm, other, after=12)
        swarm.add((1,), other.peer_id)
        await until(lambda: member(donor).restart.number)
        await until(lambda: member(donor).synced)
        assert not trail._kept and not donor.peer.replicas[0].state.source._places
        swarm.add((0,), JOINER)

    swarm.run(script=script, until_s=150.0)
    assert {f["version"] for _, _, event, f in swarm.events if event == "restart"} == {12}
    assert swarm.counts["fetching_again"] == 0


def test_a_take_over_that_ends_after_the_run_went_back_is_not_taken_for_the_present() -> None:
    """A laggard stands where the run goes back to, and is just taking newer weights over. The job ends all the same."""
    swarm = watched(plan(replicas=2))
    taken: list[tuple[float, int]] = []
    become = SimulatedEngine._become

    async def script(swarm: VirtualSwarm) -> None:
        mate, laggard = swarm.replicas(0)
        await until(lambda: member(laggard).version == 4)
        swarm.stop(laggard)
        await until(lambda: member(mate).version >= 12)
        for node in swarm.replicas(1):
            swarm.kill(node)
            lose_checkpoints(swarm, node, after=4)
            swarm.add((1,), node.peer_id)
        engine = laggard.engines[0]

        async def slow(version: int, weights: int, digits: int, before: int) -> None:
            engine.restore_s = 30.0 if version >= 12 else 0.02
            taken.append((swarm.loop.time(), version))
            await become(engine, version, weights, digits, before)

        engine._become = slow  # type: ignore[method-assign]
        swarm.resume(laggard)
        await until(lambda: member(laggard).restart.number)
        assert taken and taken[0][1] >= 12 and engine.version == 4, "the take-over has begun and not ended"
        await asyncio.sleep(0.1)
        assert laggard.peer.replicas[0].state.held is None and not member(laggard).synced

    swarm.run(script=script, until_s=200.0)
    restarts = [f["version"] for _, _, event, f in swarm.events if event == "restart"]
    assert set(restarts) == {4} and len(taken) >= 2


def tell_of_nothing(step: TrailStep, stage: int, num_tokens: int) -> TrailStep:
    lie = tuple(replace(c, num_tokens=num_tokens) if c.stage == stage else c for c in step.commits)
    return TrailStep(None, lie)


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_commits_that_nobody_signed_cost_their_teller_only(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """One donor tells a joiner commits of another stage without tokens, where the engine divides by them."""
    swarm = watched(replace(plan(replicas=2, steps=60), forward_s=0.02, state_bytes=100_000))
    follow, apply = Exchange.follow, SimulatedEngine.apply

    def lying(self: Exchange, request: TrailRequest, *more: object) -> Answer:
        answer = follow(self, request, *more)  # type: ignore[arg-type]
        over = isinstance(answer, TrailStep) and len(answer.commits) == 2
        return tell_of_nothing(answer, 1, num_tokens) if self.me == "s0.1" and over else answer

    async def strict(self: SimulatedEngine, commits: tuple[Commit, ...]) -> None:
        if commits[-1].num_tokens <= 0:
            raise BadMessage(RejectCode.MALFORMED, "a commit without tokens or norm")  # as the real engine does
        await apply(self, commits)

    monkeypatch.setattr(Exchange, "follow", lying)
    monkeypatch.setattr(SimulatedEngine, "apply", strict)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 9)
        for donor in swarm.replicas(0):
            swarm.limit(donor, up_bytes_per_s=50_000)
        joiner = swarm.add((0,), JOINER)
        await until(lambda: 0 in joiner.peer.replicas and member(joiner).synced)

    swarm.run(script=script, until_s=200.0)
    said = [f for _, peer, event, f in swarm.events if event == "join_failed" and peer == JOINER]
    assert {f["donor"] for f in said if "without a certificate" in str(f["reason"])} == {"s0.1"}
    assert swarm.counts["apply_failed"] == 0 and swarm.counts["following"] > 0


def test_a_peer_that_ends_because_it_cannot_step_leaves_what_it_stood_at_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that die in every update: the version that they could not lead on from is whole."""
    swarm = watched(plan(replicas=2, steps=12))
    apply = SimulatedEngine.apply
    refused: list[int] = []
    written: list[Written | None] = []

    async def once(self: SimulatedEngine, commits: tuple[Commit, ...]) -> None:
        victim = node_of(swarm, PeerId("s0.1"))
        if victim is not None and self is victim.engines[0] and self.version == 5 and not refused:
            refused.append(self.version)
            acting.append(asyncio.ensure_future(last(victim)))
            await asyncio.sleep(0.01)
            raise Refused(RejectCode.NOT_READY, "no ranks")
        await apply(self, commits)

    acting: list[asyncio.Future[None]] = []

    async def last(victim: Node) -> None:
        replica = victim.peer.replicas[0]
        assert replica.member.oldest.applying and await replica.state.checkpoints.write_now() is None
        written.append(await replica.state.write_last())
        assert not replica.member.synced

    monkeypatch.setattr(SimulatedEngine, "apply", once)
    swarm.run(until_s=100.0)
    acting[0].result()
    (found,) = written
    assert found is not None and found.problem is None and found.info.version == 5
    assert (0, 5) in swarm.disks[PeerId("s0.1")].files


def test_what_a_replica_cannot_apply_sends_it_to_its_mates(monkeypatch: pytest.MonkeyPatch) -> None:
    """However commits came to be what they are: an engine that refuses them ends no peer."""
    swarm = watched(plan(replicas=2, steps=12))
    apply, refused = SimulatedEngine.apply, []

    async def once(self: SimulatedEngine, commits: tuple[Commit, ...]) -> None:
        victim = node_of(swarm, PeerId("s0.1"))
        assert victim is not None
        if self is victim.engines[0] and self.version == 5 and not refused:
            refused.append(self.version)
            raise BadMessage(RejectCode.MALFORMED, "a commit without tokens or norm")
        await apply(self, commits)

    monkeypatch.setattr(SimulatedEngine, "apply", once)
    swarm.run(until_s=100.0)
    assert refused == [5] and swarm.counts["apply_failed"] == 1 and swarm.counts["restart"] == 0
    assert any(event == "synced" and peer == "s0.1" and f["how"] == "snapshot" for _, peer, event, f in swarm.events)


def test_why_nobody_hands_over_state_is_said_once() -> None:
    """The only donors are cut off for a long time: one line, not one for every attempt."""
    swarm = watched(replace(plan(replicas=2, steps=80), forward_s=0.1))

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 2)
        joiner = swarm.add((0,), JOINER)
        swarm.partition([joiner], [node for node in swarm.nodes if node is not joiner])
        await asyncio.sleep(60.0)
        swarm.heal()
        await until(lambda: 0 in joiner.peer.replicas and member(joiner).synced)

    swarm.run(script=script, until_s=300.0)
    given_up = [
        f["reason"]
        for _, peer, event, f in swarm.events
        if event == "join_failed" and peer == JOINER and "donor" not in f
    ]
    assert len(given_up) == len({str(reason).split(" stage=")[0] for reason in given_up}) <= 2, given_up


def test_no_weights_follow_from_a_buffer_that_holds_another_sum_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica has its stage's sum, and another one comes into the buffer."""
    swarm = watched(plan(replicas=2, steps=12))
    make, lost = Exchange.sum, []

    async def once(
        self: Exchange, current: Round, losses: Mapping[int, tuple[float, int]], work_root: bytes
    ) -> Finished:
        finished = await make(self, current, losses, work_root)
        if (self.me, current.stamp.step) == ("s0.1", 5) and not lost:
            lost.append(current.id)
            await self.replay_log.leave(replace(current.stamp, step=6))
        return finished

    monkeypatch.setattr(Exchange, "sum", once)
    swarm.run(until_s=100.0)
    assert lost and swarm.counts["apply_failed"] == 1 and swarm.counts["restart"] == 0
