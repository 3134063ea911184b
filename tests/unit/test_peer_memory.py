"""What needs a CUDA device is refused without one, in words."""

from __future__ import annotations

import pytest

from swarmnet.config.peer import Memory
from swarmnet.errors import UsageError
from swarmnet.peer.devices import check_memory, rounding
from swarmnet.ranks.layout import MeshLayout


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (Memory(activations="offload"), "--activations offload: the CPU's memory is host memory already"),
        (Memory(offload_optimizer=True), "memory.offload_optimizer: the CPU's memory is host memory already"),
        (Memory(compile=True), "--compile: on the CPU it costs"),
    ],
)
def test_what_needs_cuda(memory: Memory, words: str) -> None:
    check_memory(memory, MeshLayout(devices=("cuda:0",)))
    with pytest.raises(UsageError, match=words):
        check_memory(memory, MeshLayout(devices=("cpu",)))


@pytest.mark.parametrize("policy", ["stash", "selective", "recompute_layers", "recompute"])
def test_everything_else_goes_everywhere(policy: str) -> None:
    check_memory(Memory(activations=policy), MeshLayout(2, devices=("cpu", "cpu")))


def test_a_compiled_layer_chooses_itself_what_it_keeps() -> None:
    with pytest.raises(ValueError, match="compile = true chooses itself"):
        Memory(compile=True, activations="selective")


@pytest.mark.parametrize(
    "layout", [MeshLayout(2, devices=("cuda:0", "cuda:1")), MeshLayout(1, 2, "zero3", devices=("cuda:0", "cuda:1"))]
)
def test_layers_that_ranks_share_are_not_compiled(layout: MeshLayout) -> None:
    with pytest.raises(UsageError, match="exchange tensors in their middle"):
        check_memory(Memory(compile=True), layout)
    check_memory(Memory(compile=True), MeshLayout(1, 2, "zero2", devices=("cuda:0", "cuda:1")))


def test_what_rounds_in_its_own_way_is_a_numerics_class_of_its_own() -> None:
    names = {rounding(Memory(compile=a, offload_optimizer=b)) for a in (False, True) for b in (False, True)}
    assert len(names) == 4 and rounding(Memory(activations="recompute")) == rounding(Memory()) == ""
