"""A whole swarm whose replicas compute on GPUs, one of them killed: the curve is that of one process on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import run_swarm


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["deterministic", "fast"])
def test_a_killed_replica_on_a_gpu_moves_no_loss(tmp_path: Path, numerics: str) -> None:
    size = ("--stages", "2", "--replicas", "2", "--steps", "12", "--device", "cuda", "--numerics", numerics)
    settings = ("training.sequence_length=32",)
    swarm = run_swarm(tmp_path / "out", *size, "--kill", "1@5", "--verify", settings=settings)
    summary = swarm.summary
    assert (summary["steps"], summary["kills"], summary["lost"], summary["doubled"]) == (12, 1, 0, 0)
    gpus = min(torch.cuda.device_count(), 6)  # four replicas, and one kept ready for each stage's next
    assert f"on {gpus} GPU" in swarm.printed
