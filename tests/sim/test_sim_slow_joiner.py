"""A joiner whose transfer takes longer than many steps becomes a member all the same, whatever its donors do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Packed, Snapshot, SnapshotPiece, TrailStep
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

JOINER = PeerId("joiner")
STATE, PIECE = 24_000, 1_000
PLAN = Plan(stages=2, replicas=3, microbatches=4, steps=32, forward_s=0.1, state_bytes=STATE, piece_bytes=PIECE)
"""A step takes about a second. What the sum of a step weighs is 32 bytes."""


async def version(swarm: VirtualSwarm, least: int, stage: int = 1) -> None:
    """Wait until somebody has got so far."""
    got = asyncio.Event()

    def watch(peer: PeerId, event: str, facts: dict[str, object]) -> None:
        if event == "applied" and facts["stage"] == stage and int(str(facts["version"])) >= least:
            got.set()

    swarm.hooks.append(watch)
    await got.wait()


def newest(swarm: VirtualSwarm, stage: int = 1) -> int:
    return max(
        int(str(facts["version"]))
        for *_, event, facts in swarm.events
        if event == "applied" and facts["stage"] == stage
    )


def fields(swarm: VirtualSwarm, event: str, peer: PeerId = JOINER) -> list[tuple[float, dict[str, object]]]:
    return [(at, facts) for at, who, name, facts in swarm.events if who == peer and name == event]


def join(swarm: VirtualSwarm, *, down: float, name: str = JOINER) -> Node:
    swarm.limit(PeerId(name), down_bytes_per_s=down, up_bytes_per_s=1e6)
    return swarm.add((1,), name)


def check_joined(swarm: VirtualSwarm) -> tuple[dict[str, object], int]:
    """It became a member in the middle of the run and counted from then on. Returns how, and how many steps it took."""
    [(at, synced)] = fields(swarm, "synced")
    began = min(when for when, who, *_ in swarm.events if who == JOINER)
    applied = [facts["step"] for _, facts in fields(swarm, "applied")]
    first = int(str(synced["version"]))
    assert applied == list(range(first, PLAN.steps)), "it applies from the version it came to stand at"
    passed = {
        facts["version"]
        for when, who, name, facts in swarm.events
        if name == "applied" and facts["stage"] == 1 and began <= when <= at and who != JOINER
    }
    counted = [
        step
        for when, _, name, facts in swarm.events
        if name == "committed" and facts["stage"] == 1 and when > at
        for step in [facts["step"]]
        for peer, indexes in facts["contributions"]
        if peer == JOINER and indexes  # type: ignore[attr-defined]
    ]
    assert counted and min(counted) <= first + 4, "it counts from the next steps on"
    return synced, len(passed)


def test_a_transfer_of_ten_steps_is_followed_by_the_trail() -> None:
    swarm = VirtualSwarm(PLAN, 1)

    async def script(swarm: VirtualSwarm) -> None:
        await version(swarm, 5)
        join(swarm, down=2_000.0)

    swarm.run(script=script)
    synced, steps = check_joined(swarm)
    assert steps >= 10, f"the transfer was to take longer than {steps} steps"
    assert not fields(swarm, "fetching_again")
    assert len(fields(swarm, "following")) >= 10
    copied = {facts["version"] for _, facts in fields(swarm, "fetching")}
    assert len(copied) == 1 and synced["bytes"] == STATE


def test_the_copy_comes_from_all_donors_and_progress_is_told() -> None:
    swarm = VirtualSwarm(PLAN, 2)

    async def script(swarm: VirtualSwarm) -> None:
        await version(swarm, 5)
        for node in swarm.replicas(1):
            swarm.limit(node, up_bytes_per_s=1_500.0)
        join(swarm, down=1e6)

    swarm.run(script=script)
    check_joined(swarm)
    told = fields(swarm, "fetching")
    assert max(int(str(facts["donors"])) for _, facts in told) >= 2
    done = [int(str(facts["bytes"])) for _, facts in told]
    assert done == sorted(done) and done[-1] == STATE
    assert all(later - earlier > 0.9 for (earlier, _), (later, _) in itertools.pairwise(told[:-1]))


def test_donors_that_die_in_the_middle_of_the_transfer() -> None:
    swarm = VirtualSwarm(PLAN, 3)

    async def script(swarm: VirtualSwarm) -> None:
        await version(swarm, 5)
        join(swarm, down=2_000.0)
        for _ in range(2):
            await asyncio.sleep(3.0)
            swarm.kill(next(node for node in swarm.replicas(1) if node.peer_id != JOINER and swarm.may_die(node)))

    swarm.run(script=script)
    check_joined(swarm)
    assert swarm.counts["kills"] == 2


def test_a_trail_that_is_too_short_means_another_copy_with_a_word() -> None:
    swarm = VirtualSwarm(PLAN, 4)

    async def script(swarm: VirtualSwarm) -> None:
        await version(swarm, 5)
        for node in swarm.replicas(1):
            node.peer.replicas[1].exchange.replay_log.most_steps = 3
        join(swarm, down=2_000.0)
        await asyncio.sleep(8.0)
        swarm.limit(JOINER, down_bytes_per_s=1e6)

    swarm.run(script=script)
    check_joined(swarm)
    assert 1 <= len(fields(swarm, "fetching_again")) <= 2


def lie(swarm: VirtualSwarm, liar: Node, change: Callable[[Answer], Answer]) -> None:
    """What this peer answers is changed under way."""
    serve = liar.peer.on_call

    async def on_call(*args: Any) -> Any:
        async for answer in serve(*args):
            yield change(answer)

    liar.peer.on_call = on_call  # type: ignore[method-assign]


def wrong_piece(answer: Answer) -> Answer:
    if isinstance(answer, SnapshotPiece):
        data = bytes(answer.payload[0].data)
        return SnapshotPiece((Packed("uint8", (len(data),), bytes([data[0] ^ 1]) + data[1:]),))
    return answer


def wrong_digests(answer: Answer) -> Answer:
    if not isinstance(answer, Snapshot):
        return answer
    return replace(answer, content=replace(answer.content, digests=bytes(len(answer.content.digests))))


def wrong_history(answer: Answer) -> Answer:
    if isinstance(answer, TrailStep) and answer.commits:
        return replace(answer, commits=tuple(replace(each, num_tokens=each.num_tokens + 1) for each in answer.commits))
    return answer


def forged_history(answer: Answer) -> Answer:
    """Fits together, and never happened."""
    if isinstance(answer, TrailStep) and answer.finished is not None and len(answer.commits) == PLAN.stages:
        finished = replace(answer.finished, num_tokens=answer.finished.num_tokens + 1)
        commits = tuple(
            replace(each, num_tokens=finished.num_tokens) if each.stage == 1 else each for each in answer.commits
        )
        return TrailStep(finished, commits)
    return answer


@pytest.mark.parametrize("change", [wrong_piece, wrong_digests, wrong_history, forged_history])
def test_a_lying_donor_is_named_and_does_no_harm(change: Callable[[Answer], Answer]) -> None:
    swarm = VirtualSwarm(PLAN, 5)
    liars: list[PeerId] = []

    async def script(swarm: VirtualSwarm) -> None:
        await version(swarm, 5)
        liar = swarm.replicas(1)[0]
        liars.append(liar.peer_id)
        lie(swarm, liar, change)
        join(swarm, down=3_000.0)

    swarm.run(script=script)
    check_joined(swarm)
    blamed = {facts.get("donor") for _, facts in fields(swarm, "join_failed")}
    assert liars[0] in blamed


def test_joiners_slow_nobody_while_there_is_bandwidth() -> None:
    """Copies, digests and kept sums cost no steps; what bandwidth costs is measured in benchmarks/join.py."""

    def steps_in(joiners: int) -> int:
        swarm = VirtualSwarm(PLAN, 6)

        async def script(swarm: VirtualSwarm) -> None:
            await version(swarm, 5)
            for number in range(joiners):
                join(swarm, down=600.0, name=f"joiner{number}")
            began = newest(swarm)
            await asyncio.sleep(15.0)
            found.append(newest(swarm) - began)
            for node in [node for node in swarm.nodes if node.peer_id.startswith("joiner")]:
                assert not node.peer.replicas[1].member.synced, "the transfer was to last"
                swarm.kill(node)

        found: list[int] = []
        swarm.run(script=script)
        return found[0]

    alone, together = steps_in(0), steps_in(3)
    assert together >= 0.9 * alone, f"{together} steps instead of {alone}"
