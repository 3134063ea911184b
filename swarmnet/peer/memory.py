"""Which choices of memory a machine has: what needs a CUDA device is refused without one, with the reason.

Pure: knows neither torch nor a device.
"""

from __future__ import annotations

from swarmnet.config.peer import Memory
from swarmnet.errors import UsageError

_ON_THE_CPU = {
    "offload": '--activations offload: the CPU\'s memory is host memory already, so a copy there frees nothing. Use '
               '"selective", "recompute_layers" or "recompute"',
    "offload_optimizer": "memory.offload_optimizer: the CPU's memory is host memory already. Leave it away; "
                         'optimizer.state = "8bit" in the manifest takes a quarter',
    "compile": "--compile: on the CPU it costs some ten seconds a start and brings nothing that was measured (see "
               "docs/memory.md). Leave it away",
}


def rounding(memory: Memory) -> str:
    """What of it rounds in its own way, to end the name of a numerics class: layers that are compiled, and updates of a
    GPU's weights on the CPU."""
    return "/compiled" * memory.compile + "/updates-cpu" * memory.offload_optimizer


def check_memory(memory: Memory, devices: tuple[str, ...]) -> None:
    """Raises UsageError if `devices` ("cpu", "cuda:1") cannot do what `memory` says."""
    if not any(device == "cpu" for device in devices):
        return
    asked = {
        "offload": memory.activations == "offload", "offload_optimizer": memory.offload_optimizer,
        "compile": memory.compile,
    }
    for name, words in _ON_THE_CPU.items():
        if asked[name]:
            raise UsageError(words)
