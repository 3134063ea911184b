"""Which choices of memory a machine has: what needs a CUDA device is refused without one, with the reason.

Pure: knows neither torch nor a device.
"""

from __future__ import annotations

from swarmnet.config.peer import Memory
from swarmnet.errors import UsageError
from swarmnet.ranks.layout import MeshLayout

_ON_THE_CPU = {
    "offload": "--activations offload: the CPU's memory is host memory already, so a copy there frees nothing. Use "
    '"selective", "recompute_layers" or "recompute"',
    "offload_optimizer": "memory.offload_optimizer: the CPU's memory is host memory already. Leave it away; "
    'optimizer.state = "8bit" in the manifest takes a quarter',
    "compile": "--compile: on the CPU it costs some ten seconds a start and brings nothing that was measured (see "
    "docs/memory.md). Leave it away",
}


def rounding(memory: Memory) -> str:
    """The end of a numerics class's name (peers of one class have the same bits): what of `memory` rounds in its own
    way, which is layers that are compiled, and updates of a GPU's weights on the CPU. "" if nothing does."""
    return "/compiled" * memory.compile + "/updates-cpu" * memory.offload_optimizer


def check_memory(memory: Memory, layout: MeshLayout) -> None:
    """Raises UsageError if the devices of `layout` cannot do what `memory` says."""
    if memory.compile and (layout.tensor > 1 or layout.shard == "zero3"):
        raise UsageError(
            "--compile: layers that ranks share (--tensor, --shard zero3) exchange tensors in their middle"
            ", which is not compiled. Leave it away, or share otherwise, by --shard dp, zero1 or zero2"
        )
    if "cpu" not in layout.devices:
        return
    asked = {
        "offload": memory.activations == "offload",
        "offload_optimizer": memory.offload_optimizer,
        "compile": memory.compile,
    }
    for name, words in _ON_THE_CPU.items():
        if asked[name]:
            raise UsageError(words)
