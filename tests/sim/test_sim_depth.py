"""Slots that follow depth and latency keep devices as busy as the best fixed number, on virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_modules import load, printed_by
from further import further

from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

depth = load("depth")


@pytest.mark.parametrize(("stages", "round_trip_s"), [*further((4, 0.0)), (4, 0.2)])
def test_automatic_slots_are_as_good_as_the_best_fixed_number(stages: int, round_trip_s: float) -> None:
    found, slots = depth.utilisation(stages, round_trip_s, 0)
    fixed = [depth.utilisation(stages, round_trip_s, number)[0] for number in depth.fixed_of(stages)]
    assert found > 0.95 * max(fixed)
    assert min(slots) > 2 * stages / 3


def test_four_slots_are_too_few_for_eight_stages() -> None:
    assert depth.utilisation(8, 0.0, 0)[0] > 1.5 * depth.utilisation(8, 0.0, 4)[0]


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


def test_the_benchmark_writes_its_rows(tmp_path: Path) -> None:
    assert "worst ratio" in printed_by("depth", "--quick --json", tmp_path / "out.json")
    assert {row["stages"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]} == {2}
