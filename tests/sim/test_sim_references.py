"""benchmarks/references.py: what others do takes as long as arithmetic says, and moves the bytes that it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmark_modules import load

from swarmnet.ids import PeerId
from swarmnet.plan.cost import Load, Site

references = load("references")
NEAR = Site(1e12, 1e12, 1e-6)
LOAD = Load(stages=3, replicas=2, microbatches=8, microbatch_s=0.3, boundary_elements=1000, parameters=1000)


def test_1f1b_fills_and_drains() -> None:
    share = LOAD.microbatches // LOAD.replicas
    assert references.one_f_one_b(LOAD, NEAR) == pytest.approx((share + LOAD.stages - 1) * 0.3, rel=1e-3)


def test_1f1b_waits_for_the_line() -> None:
    one, slow = replace(LOAD, stages=2, microbatches=20, microbatch_s=1e-6), Site(1000.0, 1e12, 1e-6)
    # Each way carries ten activations or gradients of 2000 bytes; there and back at once but for the first.
    assert 20 < references.one_f_one_b(one, slow) < 44


def test_swarm_computes_as_fast_as_its_devices() -> None:
    found = references.swarm_like(replace(LOAD, microbatches=200), NEAR)
    assert 30 <= found < 33, "a hundred microbatches a replica of 0.3 s"


def test_swarm_moves_five_tensors_of_a_stage_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, float] = {}

    async def send(self: object, sender: PeerId, receiver: PeerId, num_bytes: float) -> None:
        server = sender if str(sender).startswith("s") else receiver
        sent[server] = sent.get(server, 0.0) + num_bytes

    monkeypatch.setattr(references.Place, "send", send)
    references.swarm_like(replace(LOAD, replicas=1, microbatches=1), NEAR)
    assert {server: num_bytes / 4000 for server, num_bytes in sent.items()} == {"s0.0": 2, "s1.0": 5, "s2.0": 3}


def test_an_all_reduce_takes_what_its_bound_says() -> None:
    line = Site(1e6, 1e12, 1e-6)
    assert references.all_reduce(4, 1e6, line) == pytest.approx(2 * 3 / 4, rel=0.1)
    assert references.all_reduce(1, 1e6, line) == 0.0


def test_scaling_shares_the_work() -> None:
    scaling = load("scaling")
    costs = {"microbatch_s": 0.3, "update_s": 0.02, "parameters": 1e6}
    rows = scaling.table("weak", (1, 2), costs, Site(25e6, 30e12, 0.05))
    assert [row["microbatches"] for row in rows] == [16, 32] and rows[0]["efficiency"] == 1.0
    assert 0.5 < rows[1]["efficiency"] <= 1.05 and 0.5 < rows[1]["busy"] < 1
