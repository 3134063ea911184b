"""Slots that follow depth and latency keep devices as busy as the best fixed number, on virtual time."""

from __future__ import annotations

import pytest
from further import further

from swarmnet.testing.links import Links
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

MICROBATCH_S, STEPS, FIRST = 0.3, 3, 1


def microbatches_of(stages: int) -> int:
    """Of a step."""
    return 16 + 2 * stages


def fixed_of(stages: int) -> tuple[int, ...]:
    """Fixed numbers of slots to compare with: four, as was the default, and some that suit depth and latency."""
    most = microbatches_of(stages)
    return tuple(sorted({4, stages, min(2 * stages, most), most}))


def utilisation(stages: int, round_trip_s: float, slots: int, *, microbatches: int = 0) -> tuple[float, list[int]]:
    """The share of time in which devices compute, and the slots of each stage at the end. slots: 0 for automatic."""
    plan = Plan(
        stages=stages,
        replicas=1,
        microbatches=microbatches or microbatches_of(stages),
        steps=STEPS,
        slots=slots,
        forward_s=MICROBATCH_S / 3,
        # With jitter an average message takes half as long again.
        links=Links(latency_s=max(round_trip_s, 1e-4) / 3),
    )
    swarm = VirtualSwarm(plan, seed=1)
    swarm.run(until_s=10_000.0)
    begin, end = swarm.applied_at[FIRST], swarm.applied_at[STEPS]
    devices = [engine.device for node in swarm.nodes for engine in node.engines.values()]
    busy = sum(job.stop - job.start for device in devices for job in device.log if begin < job.stop <= end)
    return busy / (end - begin) / len(devices), [
        replica.execution.slots for node in swarm.nodes for replica in node.peer.replicas.values()
    ]


@pytest.mark.parametrize(("stages", "round_trip_s"), [*further((4, 0.0)), (4, 0.2)])
def test_automatic_slots_are_as_good_as_the_best_fixed_number(stages: int, round_trip_s: float) -> None:
    found, slots = utilisation(stages, round_trip_s, 0)
    fixed = [utilisation(stages, round_trip_s, number)[0] for number in fixed_of(stages)]
    assert found > 0.95 * max(fixed)
    assert min(slots) > 2 * stages / 3


def test_four_slots_are_too_few_for_eight_stages() -> None:
    assert utilisation(8, 0.0, 0)[0] > 1.5 * utilisation(8, 0.0, 4)[0]


def test_slots_are_no_more_than_the_operator_lends() -> None:
    swarm = VirtualSwarm(Plan(stages=4, replicas=1, microbatches=16, slots=0), seed=2)
    taken: list[int] = []

    async def cap(swarm: VirtualSwarm) -> None:
        for node in swarm.nodes:
            node.peer.limit(slots=2, disk_bytes=0, line_bytes_per_s=0)

    def watch(peer: object, event: str, fields: dict[str, object]) -> None:
        taken.extend(replica.execution.slots for node in swarm.nodes for replica in node.peer.replicas.values())

    swarm.hooks.append(watch)
    swarm.run(script=cap)
    assert taken and max(taken) <= 2
