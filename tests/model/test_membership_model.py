"""Bounded runs of the membership model: what lies and strangers cost, what faults leave, which rules matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_liars import LIES, STRANGERS
from model_network import Setup, World
from model_rules import FINE, Rules
from model_runs import LYING_TICKS, recovery, throughput

CALM = Setup(stages=1, replicas=4, clock=FINE, microbatches=8)
SEED = 0
SHORT = 1200


def steps_of(setup: Setup, ticks: int, seed: int = SEED) -> World:
    world = World(setup, seed)
    while world.now < ticks:
        world.step()
    return world


@pytest.fixture(scope="module")
def undisturbed() -> int:
    return throughput(CALM, SEED, SHORT).steps


@pytest.mark.parametrize("lie", ["mute", "repflap", "accuse", "noack", "nodeliver", "drip", "fcommit", "equi", "idle"])
def test_a_lie_costs_little(lie: str, undisturbed: int):
    kept = throughput(replace(CALM, liars=1, modes=(lie,)), SEED, SHORT)
    assert kept.bad == {}
    assert kept.steps >= 0.7 * undisturbed  # within two minutes; what it costs falls with time


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("replicas, liars", [(4, 1), (5, 1)])
@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_lie_costs_at_most_a_fifth(lie: str, replicas: int, liars: int):
    calm = replace(CALM, replicas=replicas)
    least = 0.8 * throughput(calm, SEED, LYING_TICKS).steps
    kept = throughput(replace(calm, liars=liars, modes=(lie,)), SEED, LYING_TICKS)
    assert kept.bad == {}
    assert kept.steps >= least


@pytest.mark.parametrize("doing", ["silent", "nodeliver", "stall"])
def test_fresh_identities_do_not_swell_the_roster(doing: str):
    calm = replace(CALM, replicas=3)
    world = steps_of(replace(calm, stranger_every=100, stranger_modes=(doing,), stranger_stays=600), 900)
    assert all(len(member.opinions.roster(0)) == 3 for member in world.honest(0))
    assert len(world.committed_at) >= 0.8 * len(steps_of(calm, 900).committed_at)


def test_who_contributes_once_and_falls_silent_does_not_outvote():
    assert "once" in STRANGERS
    calm = replace(CALM, replicas=3)
    world = steps_of(replace(calm, stranger_every=100, stranger_modes=("once",)), 1000)
    assert all(len(member.opinions.roster(0)) <= 4 for member in world.honest(0))
    assert len(world.committed_at) >= 0.6 * len(steps_of(calm, 1000).committed_at)


def test_an_honest_newcomer_joins():
    world = World(replace(CALM, replicas=3), SEED)
    while world.now < 800:
        if world.now == 100:
            world.join(0, "0.new")
        world.step()
    assert all("0.new" in member.opinions.roster(0) for member in world.honest(0))


@pytest.mark.parametrize("fault", ["crash", "all but one", "uncallable"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_stage_goes_on_after_faults(fault: str, replicas: int):
    found = recovery(Setup(2, replicas, faults=(fault,), fault_every=30), seed=5000)
    assert not found.stuck and not found.away
    assert not {bad for bad in found.bad if "forge" in bad or "two majorities" in bad}


@pytest.mark.parametrize("liars", [0, 1])
def test_reports_that_refer_to_a_lost_one_hold_nobody_up(liars: int):
    setup = Setup(2, 4 if liars else 3, loss=0.15, liars=liars, faults=() if liars else ("crash", "pause"))
    found = recovery(setup, 7000, "loss")
    assert not found.stuck and not {bad for bad in found.bad if "forge" in bad or "two majorities" in bad}


@pytest.mark.parametrize("seed", range(5000, 5004))
def test_a_cable_out_makes_nobody_go_back(seed: int):
    assert recovery(Setup(2, 2, faults=("cable",)), seed).back == 0


def test_a_run_whose_stage_is_lost_goes_back():
    world = World(Setup(2, 2), SEED)
    while world.now < 400:
        if world.now == 100:
            for peer in ("1.0", "1.1"):
                world.kill(peer, restarts_after=10)
        world.step()
    assert world.returns and world.bad["gave up a version that lives"] == 0
    assert max(world.committed_at.values()) > world.returns[-1][0]


@pytest.mark.parametrize(
    "rule, setup, breaks",
    [
        ("live_roster", Setup(2, 3, faults=("all but one",), fault_every=60), "stuck"),
        ("leave_out", Setup(1, 4, clock=FINE, microbatches=8, liars=1, modes=("mute",)), "slow"),
        ("certified", Setup(2, 3, liars=1, modes=("forge", "nocommit")), "forged sum"),
        ("asks", Setup(1, 3, microbatches=6, loss=0.3), "slow"),
        ("records_hold", Setup(2, 2, faults=("cable",)), "back"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_a_rule(rule: str, setup: Setup, breaks: str):
    without = replace(setup, rules=replace(Rules(), **{rule: False}))
    match breaks:
        case "stuck":
            assert any(recovery(without, seed).stuck for seed in range(9000, 9004))
        case "slow":
            assert throughput(without, SEED, SHORT).steps < 0.5 * throughput(setup, SEED, SHORT).steps
        case "back":
            assert any(recovery(without, seed).back for seed in range(5000, 5004))
        case _:
            assert any(breaks in recovery(without, seed).bad for seed in range(9000, 9003))
