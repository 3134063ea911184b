"""Emulated compute: a stage in which every value is a hash of what it depends on, at the speed asked for.

Activations, gradients, sums and weights are small integers derived from (weights, input), so an execution on wrong
weights, a lost index or a doubled one shows in every later value. No torch.

Where a stage has several numerics classes, the last digits of a gradient are those of the class that computed it: two
aggregates of the same microbatches differ if another class computed one of them, and the last digits of the weights
remember which aggregates they came from. What is said about values ("exact") leaves those digits out.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnet.averaging.exchange import PIECE_ELEMENTS
from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.manifest.extension import Horizon, Notice
from swarmnet.manifest.schema import Delay
from swarmnet.messages import PRIME, Commit, Packed
from swarmnet.pledge import whole_of
from swarmnet.stage.interfaces import (
    KEPT_WEIGHTS,
    Audience,
    Compute,
    Contribution,
    PastWork,
    Recomputed,
    Reduced,
    SavedActivations,
    Summation,
)
from swarmnet.step.commits import evidence
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_device import Device, JobKind, JobTurn
from swarmnet.wire.codecs import check_values

NUM_ELEMENTS = 4

_MOST_STATE_BYTES = 128
"""No state is longer as it is written, before it is made as long as the plan says."""

UNPACK_S, RESTORE_S, MEASURE_S = 0.01, 0.02, 0.005
"""How long a snapshot is read outside of the device, how long its weights are written by it, and how long measured."""

_DIGITS, _ROUNDED = 16, 8
"""Bits of a number below its exact part, and how many of them a gradient's rounding takes: a step has no more than 2^8
microbatches."""

_ZEROS = memoryview(bytes(8 * PIECE_ELEMENTS))
"""What padding travels as; nothing is longer than a piece of a sum."""


def _hash(*parts: object) -> int:
    text = "/".join(part.hex() if isinstance(part, bytes) else str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def tokens_of(number: int) -> tuple[Packed, ...]:
    """Tokens of microbatch `number`: [1, 2] int32."""
    return (Packed("int32", (1, 2), struct.pack("<ii", number % 251, number % 241)),)


def proven_tokens_of(number: int) -> tuple[Packed, ...]:
    """(tokens, proof) of training microbatch `number`."""
    proof = hashlib.sha256(struct.pack("<q", number)).digest()
    return *tokens_of(number), Packed("uint8", (1, 1, 32), proof)


class SimulatedTokens:
    """Implements `trainer.trainer.TokenSource`."""

    training = staticmethod(proven_tokens_of)

    def evaluation(self, number: int) -> tuple[Packed, ...]:
        return tokens_of(10_000 + number)


@dataclass(frozen=True, slots=True)
class SimulatedWindows:
    """Implements Windows (`pipeline.inputs`): it knows all tokens, which is cheaper than a tree."""

    microbatches: int

    @property
    def layout(self) -> tuple[str, tuple[int, ...]]:
        return "uint8", (1, 1, 32)

    def check(self, step: int, index: int, tokens: Packed, proof: Packed) -> None:
        number = step * self.microbatches + index
        if [bytes(each.data) for each in (tokens, proof)] != [each.data for each in proven_tokens_of(number)]:
            raise BadMessage(RejectCode.MALFORMED, f"row 0 is not proven to be window {number} of the data")


def _hidden(value: int, width: int) -> Packed:
    """What crosses a boundary: a number, and zeros behind it."""
    return Packed("fp32", (1, 1, width), struct.pack("<f", float(value % (1 << 24))).ljust(4 * width, b"\0"))


def check_payload(payload: Sequence[Packed]) -> None:
    """Refuse what the real engine refuses."""
    for packed in payload:
        check_values(packed)


class Arithmetic:
    """The pure functions of one stage; the reference uses them without any engine. Weights and sums are exact parts.

    With several numerics classes an accumulator holds numbers with the last digits of a class.
    """

    def __init__(self, stage: int, plan: Plan) -> None:
        self.stage, self.last, self._width = stage, stage + 1 == plan.stages, plan.boundary_elements
        mixed = plan.classes != 1
        self._shift = 8 if mixed else 0  # sums of smaller numbers leave bits for the last digits
        self._digits = _DIGITS if mixed else 0

    def seed(self) -> int:
        """Weights of version 0."""
        return _hash("seed", self.stage)

    def forward(self, weights: int, payload: Sequence[Packed]) -> tuple[Packed, ...]:
        """(tokens, hidden) for the next stage."""
        return (payload[0], _hidden(_hash("forward", weights, *(bytes(p.data) for p in payload)), self._width))

    def loss(self, weights: int, payload: Sequence[Packed]) -> float:
        """The last stage's loss."""
        return _hash("loss", weights, *(bytes(p.data) for p in payload)) % 1000 / 8

    def backward(self, weights: int, payload: Sequence[Packed], gradient: Sequence[Packed]) -> tuple[Packed, ...]:
        """Input gradient; () for stage 0."""
        if self.stage == 0:
            return ()
        data = [bytes(p.data) for p in (*payload, *gradient)]
        return (_hidden(_hash("backward", weights, *data), self._width),)

    def weight_gradient(self, weights: int, payload: Sequence[Packed], gradient: Sequence[Packed]) -> list[int]:
        """What is added to the accumulator."""
        data = [bytes(p.data) for p in (*payload, *gradient)]
        return [_hash("weight", weights, place, *data) >> self._shift for place in range(NUM_ELEMENTS - 1)] + [1]

    @staticmethod
    def digest(total: Sequence[int]) -> tuple[bytes, float]:
        """(digest, squared norm) of a sum."""
        return hashlib.sha256(json.dumps(list(total)).encode()).digest(), float(sum(total))

    @staticmethod
    def apply(weights: int, total: Sequence[int], commits: Sequence[Commit], horizon: Horizon) -> int:
        """The next version's weights: of their step, too, how many steps the run has."""
        facts = [
            (
                commit.stage,
                commit.step,
                commit.num_tokens,
                commit.loss_sum,
                commit.grad_sq_norm,
                sorted(commit.discarded),
            )
            for commit in commits
        ]
        step = commits[0].step
        held = [each.value.total_steps for each in horizon.notices if each.value.since <= step]
        return _hash("apply", weights, json.dumps(list(total)), facts, *held)

    def numbers(self, exact: Sequence[int], numerics: int = 0) -> list[int]:
        """A gradient as that numerics class rounds it."""
        if not self._digits:
            return list(exact)
        return [(value << _DIGITS) | ((value ^ 37 * numerics) % (1 << _ROUNDED)) for value in exact]

    def add(self, one: Sequence[int], other: Sequence[int]) -> list[int]:
        """Of numbers, element by element."""
        return [a + b for a, b in zip(one, other, strict=True)]

    def exact(self, numbers: Sequence[int]) -> list[int]:
        """Without the last digits."""
        return [number >> self._digits for number in numbers]


@dataclass(slots=True)
class SimulatedSum:
    """The sum of one open step, and what is in it. lost: with what held it, and not discarded since."""

    total: list[int] = field(default_factory=lambda: [0] * NUM_ELEMENTS)
    added: list[int] = field(default_factory=list)
    discards: int = 0
    lost: bool = False

    def discard(self) -> None:
        """Empty it."""
        self.total, self.added = [0] * NUM_ELEMENTS, []
        self.discards += 1
        self.lost = False


@dataclass(slots=True)
class _SimulatedStash:
    """A stash. life: of the ranks that hold it."""

    payload: tuple[Packed, ...]
    life: int
    gradient: tuple[Packed, ...] = ()


class SimulatedEngine(Compute, Summation):
    """Both interfaces on virtual time. Records what it adds, for the invariants.

    weights: of this version; before: of the one earlier. digits: the last digits of the weights, if there are any.
    restore_s: how long the device writes other weights. numerics: the class that it computes in.
    """

    def __init__(
        self, stage: int, plan: Plan, device: Device, arithmetic: Arithmetic | None = None, *, numerics: int = 0
    ) -> None:
        self.stage, self.plan, self.device, self.numerics = stage, plan, device, numerics
        self.arithmetic = arithmetic or Arithmetic(stage, plan)
        self.weights = self.before = self.arithmetic.seed()
        self.version = self.digits = 0
        self.restore_s, self.averaging_s = RESTORE_S, plan.averaging_s
        self._delay = plan.delay
        self.accumulators = [SimulatedSum() for _ in range(1 + self._delay.most)]  # step s: number s % (1 + most)
        self.notices: tuple[Notice, ...] = ()
        self._past: dict[int, int] = {}  # weights of steps that are over
        self.kept_steps = KEPT_WEIGHTS
        self._buffer = [0] * NUM_ELEMENTS
        self._missing: set[int] = set()
        self._padding_missing = 0
        self._life = 0  # of the ranks that hold sums and stashes
        self._audience: Audience | None = None
        self._context = contextvars.copy_context()

    def lengthen(self, notices: tuple[Notice, ...]) -> None:
        self.notices = notices

    def subscribe(self, audience: Audience) -> None:
        self._audience, self._context = audience, contextvars.copy_context()

    def lose_ranks(self, *, told_after_s: float) -> None:
        """What computes is lost, with all sums and stashes and whatever it does right now; others replace it.
        Weights and the finished sum are elsewhere. told_after_s: until the audience is told."""
        self._life += 1
        for accumulator in self.accumulators:
            accumulator.discard()
            accumulator.lost = True
        if self._audience is not None:
            asyncio.get_running_loop().call_later(told_after_s, self._audience.on_sums_lost, context=self._context)

    async def _compute(self, turn: JobTurn, life: int | None = None) -> None:
        """Occupy the device with a third of a microbatch. life: of the ranks that hold what it needs."""
        life = self._life if life is None else life
        await self.device.run(self.device.forward_s, turn)
        # They may have been lost while it waited for its turn, or ran.
        if life != self._life:
            raise Refused(RejectCode.NOT_READY, "the ranks were lost")

    def _computed(self, stash: SavedActivations, asked: float) -> None:
        stash.compute_s += self.device.forward_s
        now = loop_time()
        stash.ran = asked, now - self.device.forward_s, now

    @property
    def num_elements(self) -> int:
        return NUM_ELEMENTS + self.plan.padding

    @property
    def delay(self) -> Delay:
        return self._delay

    def snapshot_bytes(self, stage: int) -> int:
        """The same for all stages."""
        return max(self.plan.state_bytes, _MOST_STATE_BYTES)

    def discards(self, step: int) -> int:
        return self.accumulator(step).discards

    def accumulator(self, step: int) -> SimulatedSum:
        """Where an open step is summed."""
        return self.accumulators[step % len(self.accumulators)]

    def weights_of(self, step: int) -> int:
        """What an open step is computed on."""
        if not self._is_open(step):
            raise Refused(RejectCode.STALE, f"step {step} on weights {self.version}")
        return self.before if step - self._delay.behind(step) < self.version else self.weights

    def _is_open(self, step: int) -> bool:
        return self.version <= step <= self.version + self._delay.ahead(self.version)

    async def forward(self, step: int, index: int, payload: Sequence[Packed], *, train: bool) -> SavedActivations:
        asked, discards, life = loop_time(), self.discards(step), self._life
        await self._compute(JobTurn(step, JobKind.FORWARD, -self.stage, index))
        weights = self.weights_of(step)
        check_payload(payload)
        if (self.stage, step, index) in self.plan.poison:
            raise Refused(RejectCode.OVERFLOWED, "our own result is not finite")
        stash = SavedActivations(step, index, discards)
        self._computed(stash, asked)
        if self.arithmetic.last:
            stash.loss_sum, stash.num_tokens = self.arithmetic.loss(weights, payload), 1
        else:
            stash.output = self.arithmetic.forward(weights, payload)
        stash.saved = _SimulatedStash(tuple(payload), life)
        return stash

    async def backward(self, stash: SavedActivations, gradient: Sequence[Packed]) -> tuple[Packed, ...]:
        asked, saved = loop_time(), stash.saved
        assert isinstance(saved, _SimulatedStash)
        await self._compute(JobTurn(stash.step, JobKind.BACKWARD, -self.stage, stash.index), saved.life)
        check_payload(gradient)
        self._computed(stash, asked)
        saved.gradient = tuple(gradient)
        return self.arithmetic.backward(self.weights_of(stash.step), saved.payload, gradient)

    async def accumulate(self, stash: SavedActivations) -> bool:
        asked, saved = loop_time(), stash.saved
        assert isinstance(saved, _SimulatedStash)
        await self.device.run(self.device.forward_s, JobTurn(stash.step, JobKind.WEIGHTS, -self.stage, stash.index))
        self._computed(stash, asked)
        if not self._is_open(stash.step) or saved.life != self._life:
            return False
        into = self.accumulator(stash.step)
        # What was discarded since must not come back (rule 5).
        if stash.discards != into.discards or stash.index in into.added:
            return False
        into.added.append(stash.index)
        delta = self.arithmetic.weight_gradient(self.weights_of(stash.step), saved.payload, saved.gradient)
        into.total = self.arithmetic.add(into.total, self.arithmetic.numbers(delta, self.numerics))
        return True

    def discard(self, step: int | None = None) -> None:
        """Empty the accumulators. Nothing is owed here."""
        for accumulator in self.accumulators if step is None else (self.accumulator(step),):
            accumulator.discard()

    async def contribution(self, start: int, stop: int, reference: bytes = b"") -> Packed:
        if self.accumulator(self.version).lost:
            raise Refused(RejectCode.NOT_READY, "the sum was lost with the ranks")
        return self._pack(self.accumulator(self.version).total, start, stop)

    async def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int = 0) -> Reduced:
        """Sum the contributions, whatever the run's reducer: these numbers have no outliers."""
        total = [0] * len(range(start, min(stop, NUM_ELEMENTS)))
        for contribution in contributions:
            # A Byzantine peer may send any codec that the wire knows.
            if contribution.packed.codec != "int64":
                raise BadMessage(RejectCode.MALFORMED, "not the run's codec", peer=contribution.peer)
            total = self.arithmetic.add(total, _unpack(contribution.packed, len(total)))
        return Reduced(self._pack(total, 0, stop - start))

    async def prove(self, seed: bytes) -> int:
        if self.accumulator(self.version).lost:
            raise Refused(RejectCode.NOT_READY, "the sum was lost with the ranks")
        return product(seed, self.accumulator(self.version).total, 0)

    async def weigh(self, packed: Packed | None, start: int, stop: int, seed: bytes) -> int:
        most = len(range(start, min(stop, NUM_ELEMENTS)))
        if packed is not None and (packed.codec, packed.shape) != ("int64", (stop - start,)):
            raise BadMessage(RejectCode.MALFORMED, "not the run's codec, or another size")
        return product(seed, self._buffer[start:stop] if packed is None else _unpack(packed, most), start)

    async def open_sum(self) -> None:
        self._missing, self._padding_missing = set(range(NUM_ELEMENTS)), self.plan.padding

    async def put(self, start: int, packed: Packed) -> None:
        length = packed.shape[0]
        values = _unpack(packed, len(range(start, min(start + length, NUM_ELEMENTS))))
        # Padding is counted and not kept: it is there for its time on the lines.
        self._padding_missing -= length - len(values)
        for place, value in enumerate(values, start):
            if place not in self._missing:
                raise BadMessage(RejectCode.BAD_SHAPE, "no such element, or a second one")
            self._missing.remove(place)
            self._buffer[place] = value

    async def seal(self) -> tuple[bytes, float]:
        await asyncio.sleep(self.averaging_s)
        if self._missing or self._padding_missing:
            raise BadMessage(RejectCode.BAD_SHAPE, "pieces do not cover the sum")
        return self.arithmetic.digest(self._buffer)[0], self.arithmetic.digest(self.exact_sum)[1]

    @property
    def exact_sum(self) -> list[int]:
        """What was summed, whatever the order."""
        return self.arithmetic.exact(self._buffer)

    @property
    def travel_bytes(self) -> float:
        return 8.0 * NUM_ELEMENTS + self.plan.padding_bytes * self.plan.padding

    async def finished_sum(self, start: int, stop: int) -> Packed:
        return self._pack(self._buffer, start, stop)

    async def apply(self, commits: Sequence[Commit]) -> None:
        await self.device.run(self.device.forward_s, JobTurn(self.version, JobKind.STATE, -self.stage, 0))
        # Of the step's weights, which are not the newest where steps overlap.
        self._past[self.version] = self.weights_of(self.version)
        self._past.pop(self.version - self.kept_steps, None)
        horizon = Horizon(self.plan.steps, self.notices)
        self.before, self.weights = self.weights, self.arithmetic.apply(self.weights, self.exact_sum, commits, horizon)
        # The weights remember which classes computed what.
        if self.plan.classes != 1:
            self.digits = _hash(self.digits, json.dumps(self._buffer), evidence(commits))
        self.discard(self.version)
        self.version += 1

    async def recompute(
        self, step: int, works: Sequence[PastWork], seed: bytes = b""
    ) -> tuple[tuple[Recomputed, ...], bytes]:
        found, total = list[Recomputed](), [0] * NUM_ELEMENTS
        for recomputed, delta in await asyncio.gather(*(self._again(step, work) for work in works)):
            found.append(recomputed)
            total = self.arithmetic.add(total, self.arithmetic.numbers(delta, self.numerics))
        return tuple(found), whole_of(product(seed, total, 0)) if seed else b""

    async def _again(self, step: int, work: PastWork) -> tuple[Recomputed, list[int]]:
        """A microbatch of a step that is over, and what it added to the sum."""
        index, inputs, gradient = work
        await self.device.run(3 * self.device.forward_s, JobTurn(self.version + 1, JobKind.AUDIT, -self.stage, index))
        weights = self._past.get(step)
        if weights is None:
            raise Refused(RejectCode.NOT_READY, "no weights of that step are kept here")
        check_payload((*inputs, *gradient))
        last, arithmetic = self.arithmetic.last, self.arithmetic
        recomputed = Recomputed(
            () if last else arithmetic.forward(weights, inputs),
            arithmetic.backward(weights, inputs, gradient),
            *((arithmetic.loss(weights, inputs), 1) if last else ()),
        )
        return recomputed, arithmetic.weight_gradient(weights, inputs, gradient)

    async def measure(self) -> tuple[int, bytes]:
        found = self.version, self.weights, self.digits
        await asyncio.sleep(MEASURE_S)
        return found[0], hashlib.sha256(json.dumps(found).encode()).digest()

    async def snapshot(self) -> bytes:
        await asyncio.sleep(0.01)
        state = [self.version, self.weights, self.digits, *([self.before] if self._delay.most else [])]
        return json.dumps(state).encode().ljust(self.plan.state_bytes)

    async def restore(self, data: bytes | memoryview, *, version: int, becomes: int | None = None) -> None:
        await asyncio.sleep(UNPACK_S)  # outside of the device
        found, weights, digits, *before = json.loads(bytes(data))
        if found != version:
            raise BadMessage(RejectCode.MALFORMED, "another version's snapshot")
        await self._become(version if becomes is None else becomes, weights, digits, before[0] if before else weights)

    async def reset_to_seed(self) -> None:
        seed = self.arithmetic.seed()
        await self._become(0, seed, 0, seed)

    def _pack(self, numbers: Sequence[int], start: int, stop: int) -> Packed:
        """[start, stop) of these numbers and of the padding behind them."""
        values = numbers[start:stop]
        data = struct.pack(f"<{len(values)}q", *values)
        padding = _ZEROS[: round(self.plan.padding_bytes * (stop - start - len(values)))]
        return Packed("int64", (stop - start,), b"".join((data, padding)) if values or not padding else padding)

    async def _become(self, version: int, weights: int, digits: int, before: int) -> None:
        def job() -> None:
            self.version, self.weights, self.digits, self.before = version, weights, digits, before
            self._past.clear()
            self.discard()

        await self.device.see_through(self.restore_s, JobTurn(self.version, JobKind.STATE, -self.stage, 0), job)


def product(seed: bytes, numbers: Sequence[int], start: int) -> int:
    """With as many numbers as the seed draws, modulo a prime; padding is zero."""
    drawn = hashlib.shake_256(seed).digest(8 * NUM_ELEMENTS)
    vector = [value >> 3 for value in struct.unpack(f"<{NUM_ELEMENTS}Q", drawn)]
    total: int = sum(one * other for one, other in zip(numbers, vector[start:], strict=False))
    return total % PRIME


def _unpack(packed: Packed, most: int) -> list[int]:
    """The first numbers; the rest is padding."""
    return list(struct.unpack(f"<{most}q", bytes(memoryview(packed.data)[: 8 * most])))
