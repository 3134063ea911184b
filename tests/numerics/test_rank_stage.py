"""The ranks of a mesh train as one process does, whatever they shard; and what each holds of it is its share."""

from __future__ import annotations

import functools

import pytest
from group_processes import run_group
from mesh_training import CASES, Rank, Trained, far, initial_state, layout_of, run_of, train_alone

from swarmnet.mesh.layout import MeshLayout
from swarmnet.mesh.thread_comm import run_mesh

SHARDED = [(1, 2, "dp"), (1, 2, "zero1"), (1, 2, "zero2"), (1, 4, "zero1"), (1, 4, "zero2")]
BOTH = [(2, 2, "dp"), (2, 2, "zero1"), (2, 2, "zero2"), (4, 2, "zero2")]


@functools.cache
def alone(mode: str, stage: int = 0, stages: int = 1) -> Trained:
    return train_alone(run_of(mode, stages=stages), stage)


def on_threads(layout: MeshLayout, mode: str, stage: int = 0, stages: int = 1) -> list[Trained]:
    manifest = run_of(mode, stages=stages)
    before = initial_state(manifest, stage)

    def body(data, tensor):
        rank = Rank(manifest, stage, layout, data=data, tensor=tensor)
        rank.stage.read_state(0, before)
        return rank.train()

    return run_mesh(layout.data, layout.tensor, body)


@pytest.mark.parametrize("mode", ["fp32", "deterministic"])
@pytest.mark.parametrize(("tensor", "data", "shard"), [(2, 1, "none"), *SHARDED, *BOTH])
def test_five_steps_equal_those_of_one_process(tensor: int, data: int, shard: str, mode: str) -> None:
    expected = alone(mode)
    before = initial_state(run_of(mode))
    for found in on_threads(layout_of(tensor, data, shard), mode):
        print(far(found, expected, before))
        assert max(far(found, expected, before).values()) <= 1e-5


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    return run_group("zero_rank.py", "gloo", 4, tmp_path_factory.mktemp("group") / "store")


@pytest.mark.parametrize("name", CASES)
def test_processes_equal_one(processes, name: str) -> None:
    for report in processes:
        assert max(report[name]["far"].values()) <= 1e-5, report[name]["far"]
