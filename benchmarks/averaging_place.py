"""Who a peer of `benchmarks/averaging.py` is among the others, and what it contributes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import torch

SAMPLE = 512
"""Elements at either end of the vector by which a sum is checked."""


@dataclass(frozen=True, slots=True)
class Place:
    """Who this peer is among the others. file: where gloo's processes find each other.

    namespace: the network namespace to live in, "" for this one. hosts: where everybody listens, () for loopback.
    """

    rank: int
    peers: int
    parameters: int
    file: str
    hivemind: bool
    gloo: bool
    namespace: str = ""
    hosts: tuple[str, ...] = ()


def die() -> None:
    """Kill this peer's processes, hivemind's too."""
    os.killpg(0, signal.SIGKILL)


def vector_of(place: Place) -> torch.Tensor:
    """What this peer contributes: Gaussian, as gradients nearly are."""
    return torch.randn(place.parameters, generator=torch.Generator().manual_seed(place.rank))


def sample_of(vector: torch.Tensor) -> torch.Tensor:
    """A copy of both ends."""
    return torch.cat([vector[:SAMPLE], vector[-SAMPLE:]]).float()
