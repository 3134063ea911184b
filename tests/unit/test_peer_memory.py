"""What needs a CUDA device is refused without one, in words."""

from __future__ import annotations

import pytest

from swarmnet.config.peer import Memory
from swarmnet.errors import UsageError
from swarmnet.peer.memory import check_memory


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
