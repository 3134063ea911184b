"""What needs a CUDA device is refused without one, in words."""

from __future__ import annotations

import pytest

from swarmnet.config.peer import Memory
from swarmnet.errors import UsageError
from swarmnet.peer.memory import check_memory, rounding


@pytest.mark.parametrize(("memory", "words"), [
    (Memory(activations="offload"), "--activations offload: the CPU's memory is host memory already"),
    (Memory(offload_optimizer=True), "memory.offload_optimizer: the CPU's memory is host memory already"),
    (Memory(compile=True), "--compile: on the CPU it costs"),
])
def test_what_needs_cuda(memory: Memory, words: str) -> None:
    check_memory(memory, ("cuda:0", "cuda:1"))
    with pytest.raises(UsageError, match=words):
        check_memory(memory, ("cpu",))


@pytest.mark.parametrize("policy", ["stash", "selective", "recompute_layers", "recompute"])
def test_everything_else_goes_everywhere(policy: str) -> None:
    check_memory(Memory(activations=policy), ("cpu", "cpu"))


def test_a_compiled_layer_chooses_itself_what_it_keeps() -> None:
    with pytest.raises(ValueError, match="compile = true chooses itself"):
        Memory(compile=True, activations="selective")


def test_what_rounds_in_its_own_way_is_a_numerics_class_of_its_own() -> None:
    names = {rounding(Memory(compile=a, offload_optimizer=b)) for a in (False, True) for b in (False, True)}
    assert len(names) == 4 and rounding(Memory(activations="recompute")) == rounding(Memory()) == ""
