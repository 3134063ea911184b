"""A swarm of peers with different meshes is still one process: stage 0 on two ranks each, stage 1 on two and on one.

Ranks are killed by SIGKILL while their peer holds in a phase of a step. Peers stay: they start other ranks, from state
in host memory.
"""

import math
from collections import Counter

import pytest
import torch
from running import LocalRun, run_swarm

from swarmnet.audit.cases import TOLERANCE

STEPS = 20
KILLS = (  # peer, step, phase, moment
    ("s0-r0", 4, "backward", "begin"),
    ("s0-r1", 4, "backward", "begin"),
    ("s1-r0", 6, "forward", "end"),
    ("s0-r1", 8, "averaging", "begin"),
    ("s1-r0", 9, "backward", "end"),
    ("s1-r0", 11, "apply", "begin"),
    ("s1-r0", 13, "averaging", "begin"),
    ("s0-r0", 14, "apply", "begin"),
    ("s1-r0", 16, "averaging", "end"),
)
"""Of stage 1, whose replicas are two numerics classes, in every phase: an aggregate is made again there of gradients of
which some moved from one class to the other. One replica may do all the work of a stage, so of the phases only `apply`
comes to each for certain; and whatever step is open, one of stage 0 runs backward in it."""
SMALL = (
    "averaging.codec=int64",  # so fine that what meshes round differently does not show
    "audit.microbatches=0.2",
    "audit.contributions=0.2",
    "training.sequence_length=32",
    "training.microbatch_size=2",
    "training.eval_every=0",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.head_dim=16",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> LocalRun:
    directory, chaos = tmp_path_factory.mktemp("mixed") / "out", tmp_path_factory.mktemp("chaos") / "chaos.toml"
    chaos.write_text(
        "".join(
            f'[[kill_rank]]\npeer = "{peer}"\nstep = {step}\nphase = "{phase}"\nmoment = "{moment}"\n'
            for peer, step, phase, moment in KILLS
        )
    )
    # One slot each, so that every replica gets work.
    size = ("--stages", "2", "--replicas", "2", "--steps", str(STEPS), "--slots", "1", "--ranks", "0=2,1.0=2")
    words = (*size, "--numerics", "deterministic", "--chaos", str(chaos))
    return run_swarm(directory, *words, settings=SMALL)


def test_losses_and_weights_are_those_of_one_process(finished: LocalRun) -> None:
    assert finished.losses == pytest.approx(finished.reference.losses, abs=1e-5) and len(finished.losses) == STEPS
    assert finished.losses[-1] < finished.losses[0] - 0.3
    checked = 0
    for where, value, weight in finished.last_weights():
        checked += 1
        torch.testing.assert_close(value, weight, rtol=1e-4, atol=2e-5, msg=where)
    assert checked == 2 * len(finished.reference.weights)


def test_every_index_is_counted_once_and_replicas_of_a_stage_have_the_same_bits_on_any_mesh(finished: LocalRun) -> None:
    finished.check_invariants()


def test_ranks_die_and_others_start(finished: LocalRun) -> None:
    struck = [event["order"] for event in finished.of("kill_rank")]
    assert {f"kill_rank {peer}@{step} {phase}" for peer, step, phase, _ in KILLS if phase == "apply"} <= set(struck)
    assert any(order.endswith("backward") for order in struck) and len(set(struck)) == len(struck)
    assert finished.summary["kills"] == 0
    for peer in ("s0-r0", "s0-r1", "s1-r0"):
        kills = [event["order"] for event in finished.of("kill_rank") if event["child"] == peer]
        lives = lives_of(peer, finished)
        assert [life.count("rank_lost") for life in lives] == [1] * len(kills) + [0], (kills, lives)
        for order, life in zip(kills, lives, strict=False):
            if order.endswith(("backward", "forward end")):  # of a step that is open: its sum is gone
                assert life.count("sum_lost") == 1, (order, life)


def lives_of(peer: str, finished: LocalRun) -> list[list[str]]:
    """What befell the ranks of `peer`, in each epoch of theirs."""
    lives: list[list[str]] = []
    for event in finished.events:
        if event["name"] == peer and event["event"] == "mesh_started":
            lives.append([])
        elif event["name"] == peer and event["event"] in ("rank_lost", "sum_lost"):
            lives[-1].append(event["event"])
    return lives


def test_ranks_are_audited_and_audit_though_they_die(finished: LocalRun) -> None:
    """Bit by bit in stage 0, whose replicas are of one numerics class; up to rounding in stage 1."""
    assert {event["name"] for event in finished.of("audited") if event["ok"]} >= {"s0-r0", "s0-r1"}
    assert all(event["ok"] for event in finished.of("audited"))
    ids = {event["peer"]: event["name"] for event in finished.of("listening")}
    did = Counter(
        ids[peer]
        for commit in {event["step"]: event for event in finished.of("committed") if event["stage"] == 1}.values()
        for peer, own in commit["contributions"]
        for _ in own
    )
    # A fifth of all work is looked at, and one replica may do nearly all of it.
    mates = {"s1-r0": "s1-r1", "s1-r1": "s1-r0"}
    busy = {mates[name] for name, indexes in did.items() if indexes >= 40}
    assert busy and busy <= {event["name"] for event in finished.of("weighed")} <= mates.keys()
    assert max(event["off"] for event in finished.of("weighed")) < TOLERANCE / 64
    assert [*finished.of("withheld"), *finished.of("disputed")] == []


def test_a_killed_rank_costs_one_absence_at_most(finished: LocalRun) -> None:
    names = {event["peer"]: event["name"] for event in finished.of("listening")}
    for peer in ("s0-r0", "s0-r1", "s1-r0"):
        times = [event["t"] for event in finished.of("kill_rank") if event["child"] == peer]
        missed = [event for event in finished.of("evicted") if names[event["peer"]] == peer]
        assert all(event["reason"] != "dead" for event in missed), missed
        for begin, end in zip(times, [*times[1:], math.inf], strict=True):
            assert len({event["step"] for event in missed if begin < event["t"] <= end}) <= 1, missed
