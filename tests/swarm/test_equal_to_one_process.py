"""The promise: a swarm of real processes has the loss curve and the weights of a single one, killed peers or not.

Six peers and a trainer over a real DHT and real gRPC, on real text, killed by SIGKILL in the middle of a step.
"""

import pytest
import torch
from running import LocalRun, run_swarm

STAGES, REPLICAS = 3, 2
KILLS = ("0@3", "1@8", "2@13")  # first, middle and last stage

SMALL = (
    "training.sequence_length=32",
    "training.microbatch_size=2",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.head_dim=16",
    "training.eval_every=10",
)

OVERLAP = ("averaging.sync=overlap", "averaging.overlap_after=6", "optimizer.lead=2.5")
"""Steps overlap after the first kill and before the second."""


@pytest.fixture(
    scope="module",
    params=[
        ("fast", KILLS, OVERLAP),
        pytest.param(("fast", KILLS, ()), marks=pytest.mark.long),
        pytest.param(("deterministic", KILLS, OVERLAP), marks=pytest.mark.long),
        pytest.param(("deterministic", KILLS, ()), marks=pytest.mark.long),  # test_chaos_phases strikes harder
        pytest.param(("deterministic", (), ()), marks=pytest.mark.long),  # undisturbed: less is asked of them
        pytest.param(("fast", (), ()), marks=pytest.mark.long),
    ],
    ids=["fast-overlap-killed", "fast-killed", "overlap-killed", "deterministic-killed", "deterministic", "fast"],
)
def finished(request, tmp_path_factory) -> LocalRun:
    numerics, kills, settings = request.param
    size = ("--stages", str(STAGES), "--replicas", str(REPLICAS), "--steps", "20", "--numerics", numerics)
    killed = [word for kill in kills for word in ("--kill", kill)]
    # On a grid so fine rounding of kernels does not grow.
    settings = (*settings, *(("averaging.codec=int64",) if numerics == "fast" else ()))
    return run_swarm(tmp_path_factory.mktemp("swarm") / "out", *size, *killed, "--verify", settings=(*SMALL, *settings))


def test_the_curve_is_one_process_s_curve(finished: LocalRun) -> None:
    reference = finished.reference
    assert len(finished.losses) == 20 == len(reference.losses)
    assert finished.losses[-1] < finished.losses[0] - 0.3  # it learns
    if finished.manifest.numerics.mode == "deterministic":
        assert finished.losses == reference.losses
    else:
        assert max(abs(a - b) for a, b in zip(finished.losses, reference.losses, strict=True)) <= 1e-5
    checked = 0
    for where, value, weight in finished.last_weights():
        checked += 1
        if finished.manifest.numerics.mode == "deterministic":
            assert torch.equal(value, weight), where
        else:
            assert torch.allclose(value, weight, atol=2e-4), where
    assert checked == REPLICAS * len(reference.weights)


def test_nothing_is_lost_or_doubled(finished: LocalRun) -> None:
    finished.check_invariants()


def test_the_kills_happened_and_the_killed_came_back(finished: LocalRun) -> None:
    killed = finished.of("killed")
    assert len(killed) == finished.summary["kills"]
    restarted = [event for event in finished.of("synced") if event["how"] == "snapshot"]
    if killed:
        assert {int(event["child"][1]) for event in killed} == {0, 1, 2}
        assert {event["name"] for event in restarted} >= {event["child"] for event in killed}


def test_held_out_loss_is_measured(finished: LocalRun) -> None:
    steps = [event["step"] for event in finished.of("evaluated")]
    assert steps == [0, 10, 20]
