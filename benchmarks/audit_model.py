"""A run that learns something in integers: one linear regression over all stages of a simulated swarm.

Each stage has three weights, and adds their product with three features of the microbatch to what came before; the last
one holds the sum against a target. So the loss is a real one, its gradient an exact vector of integers, and a false
gradient, activation or sum moves the weights of a run as it would in a large one. Numbers are fixed point: `ONE` is 1.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Sequence

from swarmnet.manifest.extension import Horizon
from swarmnet.messages import Commit, Packed
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import NUM_ELEMENTS, Arithmetic, tokens_of

ONE = 1 << 10
"""1 as a fixed point number. What crosses a boundary stays below 2^23, which fp32 holds exactly."""

WEIGHTS = NUM_ELEMENTS - 1
"""Of a stage; the last element of a sum counts microbatches."""

LARGEST = 1 << 14
"""No weight grows beyond it."""

RATE, CLIP = 128, 512 * ONE
"""The update is the mean gradient over RATE, clipped to a norm of CLIP over all stages."""

HELD_OUT = range(1_000_000, 1_001_000)
"""Microbatches that no run of these trains on."""


def _drawn(*parts: object) -> bytes:
    return hashlib.sha256("/".join(map(str, parts)).encode()).digest()


@functools.lru_cache(maxsize=1 << 16)
def features(tokens: bytes, stage: int) -> list[int]:
    """Of a microbatch with these tokens, in [-4, 4]."""
    return [byte % 9 - 4 for byte in _drawn("features", tokens.hex(), stage)[:WEIGHTS]]


@functools.cache
def truth(stage: int) -> list[int]:
    """The weights that targets are made with."""
    return [(byte - 128) * ONE // 64 for byte in _drawn("truth", stage)[:WEIGHTS]]


@functools.lru_cache(maxsize=1 << 16)
def target(tokens: bytes, stages: int) -> int:
    """What the sum over all stages should be: that of `truth`, and noise of about 1."""
    noise = (sum(_drawn("noise", tokens.hex())[:4]) - 510) * ONE // 148
    return noise + sum(dot(truth(stage), features(tokens, stage)) for stage in range(stages))


def dot(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(one, other, strict=True))


def number_of(packed: Packed) -> int:
    """What crosses a boundary."""
    return int(struct.unpack("<f", bytes(packed.data[:4]))[0])


def packed_number(value: int) -> Packed:
    """That, on its way."""
    return Packed("fp32", (1, 1, 1), struct.pack("<f", float(max(min(value, 1 << 23), -1 << 23))))


def pack_weights(weights: Sequence[int]) -> int:
    """One number, as the simulated engine holds weights."""
    return int.from_bytes(struct.pack(f"<{WEIGHTS}q", *weights), "little")


def weights_in(weights: int) -> list[int]:
    """What `pack_weights` has packed."""
    return list(struct.unpack(f"<{WEIGHTS}q", weights.to_bytes(8 * WEIGHTS, "little")))


class Regression(Arithmetic):
    """The arithmetic of one stage."""

    def __init__(self, stage: int, plan: Plan) -> None:
        super().__init__(stage, plan)
        self._stages = plan.stages

    def seed(self) -> int:
        """Zeros."""
        return pack_weights([0] * WEIGHTS)

    def _sum(self, weights: int, payload: Sequence[Packed]) -> int:
        before = number_of(payload[1]) if self.stage else 0
        return before + dot(weights_in(weights), features(bytes(payload[0].data), self.stage))

    def _error(self, weights: int, payload: Sequence[Packed]) -> int:
        return self._sum(weights, payload) - target(bytes(payload[0].data), self._stages)

    def forward(self, weights: int, payload: Sequence[Packed]) -> tuple[Packed, ...]:
        return (payload[0], packed_number(self._sum(weights, payload)))

    def loss(self, weights: int, payload: Sequence[Packed]) -> float:
        return min((self._error(weights, payload) / ONE) ** 2, 9_999.0)

    def backward(self, weights: int, payload: Sequence[Packed], gradient: Sequence[Packed]) -> tuple[Packed, ...]:
        if self.stage == 0:
            return ()
        return (packed_number(self._back(weights, payload, gradient)),)

    def weight_gradient(self, weights: int, payload: Sequence[Packed], gradient: Sequence[Packed]) -> list[int]:
        back = self._back(weights, payload, gradient)
        return [back * x for x in features(bytes(payload[0].data), self.stage)] + [1]

    def _back(self, weights: int, payload: Sequence[Packed], gradient: Sequence[Packed]) -> int:
        return self._error(weights, payload) if self.last else number_of(gradient[0])

    @staticmethod
    def digest(total: Sequence[int]) -> tuple[bytes, float]:
        return Arithmetic.digest(total)[0], float(sum(value * value for value in total[:WEIGHTS]))

    @staticmethod
    def apply(weights: int, total: Sequence[int], commits: Sequence[Commit], horizon: Horizon) -> int:
        norm = math.isqrt(int(sum(commit.grad_sq_norm for commit in commits)))
        count = commits[-1].num_tokens
        # The mean is norm / count long; at most CLIP of it counts.
        over, under = (CLIP * count, norm) if norm > CLIP * count else (1, 1)
        moved = [
            w - value * over // (under * count * RATE) for w, value in zip(weights_in(weights), total, strict=False)
        ]
        return pack_weights([max(min(w, LARGEST), -LARGEST) for w in moved])


def held_out_loss(weights: Sequence[int]) -> float:
    """Mean squared error on microbatches that nobody has trained on. weights: of each stage."""
    total = 0.0
    for number in HELD_OUT:
        tokens = bytes(tokens_of(number)[0].data)
        found = sum(dot(weights_in(packed), features(tokens, stage)) for stage, packed in enumerate(weights))
        total += ((found - target(tokens, len(weights))) / ONE) ** 2
    return total / len(HELD_OUT)
