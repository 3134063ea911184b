"""A member joins a large stage over home lines, on virtual time: when it is level, and what that costs the others.
Production peers, exchanges, donors and joiner in one process; bytes are a thousandth, seconds a twentieth.
The stage's members compute for a part of a step and average for the rest, and all have the same line.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Protocol
from swarmnet.net.traffic import STATE_SHARE
from swarmnet.state.catch_up import WITHIN, line_needed, rate_needed, steps_until_in_sync
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Enough, VirtualSwarm

SMALLER, FASTER = 1000, 20
JOINER = PeerId("joiner")
TIMERS = Protocol(suspect_s=12.0, long_silence_s=60.0)
BEFORE = 4
"""Steps before the newcomer comes."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A stage, its members' lines, and how long a step takes."""

    members: int = 8
    mbit: float = 200.0
    step_s: float = 80.0
    parameters: int = 1_000_000_000
    state_bytes: int = 12
    """Of weights and moments, a parameter."""
    sum_bytes: float = 0.6
    """Of a sum as it travels, a parameter; a contribution has as many."""
    within: int = 40
    """Steps that the newcomer has."""

    @property
    def line(self) -> float:
        """Bytes per second, of all, either way."""
        return self.mbit * 125_000

    @property
    def round_s(self) -> float:
        """What a round takes at least: a contribution and a sum, but for one's own part."""
        each = self.sum_bytes * self.parameters * (self.members - 1) / self.members
        return 2 * each / self.line


@dataclass(frozen=True, slots=True)
class Joined:
    """What became of it. steps: that the members made until it was level; None: it never was."""

    steps: float | None
    state_steps: float
    """Until the copy was there."""
    step_s: float
    """Of the members, while it was on the way."""
    alone_s: float
    """Before it came."""
    foreseen: tuple[tuple[float, float | None], ...]
    """(steps since it came, in how many more it said it would be level), now and then."""
    too_slow: dict[str, Any] | None
    """What it said when it found that it would never be."""

    @property
    def slowed(self) -> float:
        return self.step_s / self.alone_s - 1


def plan_of(scene: Scene) -> Plan:
    computes_s = scene.step_s - scene.round_s
    assert computes_s > 0, "the round alone takes longer than the step"
    size = scene.parameters // SMALLER
    return Plan(
        stages=2,
        microbatches=scene.members,
        slots=scene.members,
        steps=BEFORE + scene.within + 2,
        forward_s=computes_s / 4 / FASTER,  # forward, backward, weight pass, and the optimizer's step
        padding=size - 4,
        padding_bytes=scene.sum_bytes,
        sum_piece=size // 64,
        state_bytes=size * scene.state_bytes,
        piece_bytes=32 << 10,
        protocol=TIMERS,
        served=((0,), *((1,) for _ in range(scene.members))),
    )


def play(scene: Scene, seed: int = 1) -> tuple[Joined, VirtualSwarm]:
    swarm = VirtualSwarm(plan_of(scene), seed)
    swarm.slowdown["s0.0"] = 0.001
    applied: list[tuple[float, int]] = []
    told: dict[str, float] = {}
    came: list[float] = []
    foreseen: list[tuple[float, float | None]] = []
    rate = scene.line / SMALLER * FASTER

    def watch(peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        now = swarm.loop.time()
        if event == "applied" and fields["stage"] == 1 and (not applied or fields["version"] > applied[-1][1]):
            applied.append((now, fields["version"]))
        if peer == JOINER and event in ("following", "synced"):
            told.setdefault(event, now)
        if peer == JOINER and event in ("fetching", "following"):
            foreseen.append((now, fields["level_in"]))
        news.set()

    news = asyncio.Event()

    async def until(over: Callable[[], bool]) -> None:
        while not over():
            news.clear()
            await news.wait()

    async def script(swarm: VirtualSwarm) -> None:
        for node in swarm.replicas(1):
            swarm.limit(node, up_bytes_per_s=rate, down_bytes_per_s=rate)
        await until(lambda: bool(applied) and applied[-1][1] >= BEFORE)
        swarm.limit(JOINER, up_bytes_per_s=rate, down_bytes_per_s=rate)
        came.append(swarm.loop.time())
        swarm.add((1,), JOINER)
        await until(lambda: "synced" in told or applied[-1][1] >= BEFORE + scene.within)
        raise Enough

    swarm.hooks.append(watch)
    swarm.run(script=script, until_s=1e5)

    def steps_at(when: float) -> float:
        """Versions, with a fraction."""
        before = max(((at, version) for at, version in applied if at <= when), default=(0.0, 0))
        after = min(((at, version) for at, version in applied if at > when), default=None)
        return before[1] + ((when - before[0]) / (after[0] - before[0]) if after else 0.0)

    level = told.get("synced")
    last = level or applied[-1][0]
    lengths = [(later, later - at) for (at, _), (later, _) in itertools.pairwise(applied)]
    return Joined(
        None if level is None else steps_at(level) - steps_at(came[0]),
        steps_at(told.get("following", last)) - steps_at(came[0]),
        FASTER * statistics.mean(took for later, took in lengths if came[0] + scene.step_s / FASTER < later <= last),
        FASTER * statistics.mean([took for later, took in lengths if later <= came[0]][1:]),
        tuple((steps_at(at) - steps_at(came[0]), level_in) for at, level_in in foreseen),
        next((fields for _, _, event, fields in swarm.events if event == "too_slow"), None),
    ), swarm


SCENES = (Scene(members=8, sum_bytes=1.1), Scene(members=3, sum_bytes=1.45))
"""Steps of 80 s that are nearly all round: no line ever rests."""


def arrives(lines: list[float], down: float) -> float:
    """Bytes per second that a joining replica can count on: a tenth of each source's line while steps fill it, and no
    more than its own line carries."""
    return min(down, STATE_SHARE * sum(lines))


def report(scene: Scene) -> dict[str, Any]:
    """Play it; print what became of it, beside what the arithmetic of lines says; return it."""
    joined, _ = play(scene)
    size = scene.parameters
    to_come = scene.state_bytes * size, scene.sum_bytes * size, joined.step_s
    foretold = steps_until_in_sync(*to_come, arrives([scene.line] * scene.members, scene.line))
    here = rate_needed(*to_come, WITHIN)
    each = line_needed(here, scene.members)
    for line in (
        f"{scene.members} members on {scene.mbit:g} Mbit/s, {size / 1e9:g}B parameters, sums of {scene.sum_bytes:g} B",
        f"  level after   {in_steps(joined.steps)}, the copy after {joined.state_steps:.1f}",
        f"  by tenths     {in_steps(foretold)}",
        f"  the others    {joined.step_s:.1f} s a step, not {joined.alone_s:.1f}: {100 * joined.slowed:.0f} % more",
        f"  it would take {8e-6 * here:.0f} Mbit/s here and {8e-6 * each:.0f} at each member, for {WITHIN} steps",
    ):
        print(line)
    return {"members": scene.members, "steps": joined.steps, "foretold": foretold, "slowed": joined.slowed}


def in_steps(steps: float | None) -> str:
    """In words."""
    return "never" if steps is None else f"{steps:.1f} steps"
