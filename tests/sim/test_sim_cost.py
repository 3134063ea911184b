"""What a step is said to cost, and what whole peers take on virtual time: a stage of 1B parameters at 200 Mbit/s."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmark_modules import load

from swarmnet.config.fleet import Members
from swarmnet.manifest.schema import Cut, Manifest, Model, Training
from swarmnet.plan.choice import search
from swarmnet.plan.cost import Load, Site, Way, cost
from swarmnet.plan.members import situated

SITE = Site(bytes_per_s=200e6 / 8, flops_per_s=30e12)
LARGE = Manifest(
    model=Model(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=66,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
    ),
    cut=Cut(stages=3),
    training=Training(total_steps=1000, microbatches=12, microbatch_size=1, sequence_length=2048),
)
MEMBERS, COUNTS = Members.alike(2, mbit=200, tflops=30, round_trip_s=0.05), ((2,),) * 3
accuracy = load("plan_accuracy")


def load_of_large() -> Load:
    found = situated(LARGE.of_stage(0), MEMBERS, Way("int8", "int8", "int8", "exact", 1), counts=COUNTS)
    assert found is not None
    return found.load


def simulated_s(load: Load, way: Way) -> float:
    """Seconds a step, in steady state."""
    return accuracy.simulated(accuracy.Fleet("", load, SITE, way), steps=8)[0]


@pytest.mark.parametrize(
    ("sync", "codec", "boundary"), [("overlap", "small", ("int8", "nf4")), ("local", "int8", ("fp32", "fp32"))]
)
def test_a_step_takes_what_is_said_nearly(sync: str, codec: str, boundary: tuple[str, str]) -> None:
    load = load_of_large()
    load = replace(load, update_s=load.microbatch_s / 3)  # as the simulated device's
    assert load.parameters == pytest.approx(1e9, rel=0.1)
    way = Way(*boundary, codec, sync, slots=4, inner_steps=10**9 if sync == "local" else 1)
    assert cost(load, SITE, way).step_s == pytest.approx(simulated_s(load, way), rel=0.15)


def test_slots_that_are_too_few_cost_what_is_said() -> None:
    load = replace(load_of_large(), boundary_elements=1, update_s=0.1)
    way = Way("fp32", "fp32", "int64", "local", slots=1, inner_steps=10**9)
    few, said = simulated_s(load, way), cost(load, SITE, way)
    assert said.step_s == pytest.approx(few, rel=0.15)
    enough = replace(way, slots=said.slots)
    assert simulated_s(load, enough) < 0.75 * few


def test_the_choice_for_a_stage_of_1b_is_as_fast_as_is_said() -> None:
    best, _ = search(LARGE.of_stage(0), {"averaging.sync": "exact"}, MEMBERS, counts=COUNTS)
    assert (best.way.codec, best.way.activations, best.way.gradients) == ("small", "int8", "int8")
    load = load_of_large()
    assert best.cost.step_s == pytest.approx(simulated_s(load, best.way), rel=0.15)
