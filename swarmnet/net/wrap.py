"""What a test bench puts between a process and the network: faults below the code under test.

Production passes nothing, and nothing is then in between. `swarmnet local --chaos` does (local/interpose.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from swarmnet.transport import Service, Transport


async def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Wrap:
    """transport: what the process speaks through. service: what hears others. beside: runs until the process ends."""

    transport: Callable[[Transport], Transport] = lambda transport: transport
    service: Callable[[Service], Service] = lambda service: service
    beside: Callable[[], Coroutine[Any, Any, None]] = _nothing


NOTHING_BETWEEN = Wrap()
