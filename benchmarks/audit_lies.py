"""The lies about work that `benchmarks/audit.py` tells a simulated stage, each once; see `strangers_lies`.

A liar is a production peer whose arithmetic is false. It lies on purpose, so that what it hands on, answers, sums,
pledges and serves fits together: only who computes it again can tell.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from audit_model import ONE, number_of, packed_number
from strangers_lies import Bent, Lie

from swarmnet.audit.case import suspect_of
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Audits, Manifest
from swarmnet.messages import NONE, Answer, AuditRequest, Case, Control, Gradient, MemberState, Packed, Request
from swarmnet.pipeline.works import digest
from swarmnet.statement import statement
from swarmnet.testing.virtual_engine import NUM_ELEMENTS, SimulatedEngine
from swarmnet.testing.virtual_swarm import SimulatedSigner, VirtualSwarm
from swarmnet.transport import ReadPayload

TENTH, SCALE, QUIET_STEPS = 0.1, 10, 4

LIES: dict[str, type[FalseWork]] = {}
"""By name, in the order they are printed."""


def lie(kind: type[FalseWork]) -> type[FalseWork]:
    """Add it to the table under its name in words: SignFlip is `sign-flip`."""
    name = "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).strip("-")
    kind.words = " ".join((kind.__doc__ or "").split())
    LIES[name] = kind
    return kind


class FalseWork(Lie):
    """is honest"""

    share: ClassVar[float] = 1.0
    """Of its microbatches that are false; 0: it does not lie about those."""
    together: ClassVar[int] = 1
    """How many of a stage lie so."""
    one_operator: ClassVar[bool] = False
    """Does one operator run them?"""
    found_by: ClassVar[str] = "microbatch"
    """What shows it: an audit of a microbatch or of a whole contribution, what was sent beside what was counted, the
    linear check of a sum, or the jury."""

    def __init__(self, swarm: VirtualSwarm, me: PeerId, stage: int) -> None:
        super().__init__(swarm, me)
        self.stage = stage  # type: ignore[misc]  # of this liar, not of its kind
        self.lies_told = 0
        self._false: dict[tuple[int, int], bool] = {}
        self._rng = random.Random(f"{me}/{swarm.seed}")

    # what a kind of lie says

    def decides(self, step: int) -> bool:
        """Is the next microbatch of this step false?"""
        return self.share > 0 and (self.share >= 1 or self._rng.random() < self.share)

    def output(self, step: int, honest: tuple[Packed, ...]) -> tuple[Packed, ...]:
        """What is handed on."""
        return honest

    def answer(self, step: int, honest: tuple[Packed, ...]) -> tuple[Packed, ...]:
        """The gradient of the input."""
        return honest

    def delta(self, step: int, honest: Sequence[int]) -> Sequence[int]:
        """What is added to the sum."""
        return honest

    # how it is said

    def bend(self, engine: SimulatedEngine) -> Any:
        async def forward(step: int, index: int, payload: Sequence[Packed], *, train: bool) -> Any:
            stash = await engine.forward(step, index, payload, train=train)
            if train and self.lying:
                self._false[step, index] = self.decides(step)
                if self._false[step, index] and stash.output:
                    stash.output = self.output(step, stash.output)
            return stash

        async def backward(stash: Any, gradient: Sequence[Packed]) -> tuple[Packed, ...]:
            honest = await engine.backward(stash, gradient)
            return self.answer(stash.step, honest) if honest and self._lies_in(stash) else honest

        async def accumulate(stash: Any) -> bool:
            added = await engine.accumulate(stash)
            if added and self._lies_in(stash):
                self.lies_told += 1
                saved, into = stash.saved, engine.accumulator(stash.step)
                honest = engine.arithmetic.weight_gradient(engine.weights_of(stash.step), saved.payload, saved.gradient)
                false = [*self.delta(stash.step, honest[:-1]), honest[-1]]
                change = [new - old for new, old in zip(false, honest, strict=True)]
                into.total = engine.arithmetic.add(into.total, engine.arithmetic.numbers(change))
            return added

        return Bent(engine, forward=forward, backward=backward, accumulate=accumulate)

    def _lies_in(self, stash: Any) -> bool:
        return self._false.get((stash.step, stash.index), False)


def times(factor: int, packed: tuple[Packed, ...]) -> tuple[Packed, ...]:
    """A gradient, so many times as long."""
    return tuple(packed_number(factor * number_of(each)) for each in packed)


class Flips(FalseWork):
    """The other sign, in its answers and its sum alike."""

    factor: ClassVar[int] = -1

    def answer(self, step: int, honest: tuple[Packed, ...]) -> tuple[Packed, ...]:
        return times(self.factor, honest)

    def delta(self, step: int, honest: Sequence[int]) -> Sequence[int]:
        return [self.factor * value for value in honest]


@lie
class SignFlip(Flips):
    """goes back along the gradient, not against it"""


@lie
class Scaled(Flips):
    """makes every gradient ten times as long"""

    factor = SCALE


@lie
class Random(FalseWork):
    """hands on noise instead of what it computes, and sums noise"""

    def output(self, step: int, honest: tuple[Packed, ...]) -> tuple[Packed, ...]:
        return (honest[0], packed_number(self._noise()))

    def answer(self, step: int, honest: tuple[Packed, ...]) -> tuple[Packed, ...]:
        return (packed_number(self._noise()),)

    def delta(self, step: int, honest: Sequence[int]) -> Sequence[int]:
        return [4 * self._noise() for _ in honest]

    def _noise(self) -> int:
        return self._rng.randint(-8 * ONE, 8 * ONE)


@lie
class Weights(Flips):
    """flips the sign of what it sums, and hands on what is right"""

    found_by = "contribution"

    def answer(self, step: int, honest: tuple[Packed, ...]) -> tuple[Packed, ...]:
        return honest


class Copies(FalseWork):
    """What it has computed for another microbatch."""

    def __init__(self, swarm: VirtualSwarm, me: PeerId, stage: int) -> None:
        super().__init__(swarm, me, stage)
        self._kept: dict[str, tuple[int, Any]] = {}  # step and honest value, by what it is

    def of_another(self, what: str, step: int, honest: Any) -> Any:
        raise NotImplementedError

    def output(self, step: int, honest: tuple[Packed, ...]) -> tuple[Packed, ...]:
        return (honest[0], self.of_another("output", step, honest[1]))

    def answer(self, step: int, honest: tuple[Packed, ...]) -> tuple[Packed, ...]:
        return (self.of_another("answer", step, honest[0]),)

    def delta(self, step: int, honest: Sequence[int]) -> Sequence[int]:
        found: Sequence[int] = self.of_another("delta", step, honest)
        return found


@lie
class Stale(Copies):
    """gives the answers of an earlier step"""

    def of_another(self, what: str, step: int, honest: Any) -> Any:
        since, value = self._kept.get(what, (step, honest))
        # Ten steps old at the most.
        if what not in self._kept or since < step - 10:
            self._kept[what] = step, honest
        return value


@lie
class Lazy(Copies):
    """computes one microbatch of a step and gives its answer for all others"""

    def of_another(self, what: str, step: int, honest: Any) -> Any:
        if self._kept.get(what, (-1,))[0] != step:
            self._kept[what] = step, honest
        return self._kept[what][1]


@lie
class Tenth(Flips):
    """flips the sign in one of ten microbatches"""

    share = TENTH


@lie
class Adaptive(Flips):
    """flips the sign until somebody looks at its work, and then for four steps does not"""

    _quiet_until = -1

    def decides(self, step: int) -> bool:
        self._at_step = step
        return step >= self._quiet_until

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        if isinstance(request, AuditRequest):
            self._quiet_until = self._at_step + QUIET_STEPS
        return honest


@lie
class Pair(Flips):
    """two of a stage flip the sign, and neither says anything against the other"""

    together = 2

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        return () if isinstance(message, Case) and suspect_of(message) in self.friends else (message,)


@lie
class Kin(Pair):
    """are two such liars, whom one operator runs"""

    one_operator = True


@lie
class FalseSender(FalseWork):
    """counts and pledges what is right, and sends its answers with the other sign"""

    found_by = "sent"

    async def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        async with contextlib.aclosing(honest):
            async for answer in honest:
                yield self._false_answer(answer) if isinstance(answer, Gradient) else answer

    def _false_answer(self, honest: Gradient) -> Gradient:
        if not honest.sents:
            return honest
        self.lies_told += 1
        payload, (own, *others) = times(-1, honest.payload), honest.sents
        sent = replace(own, digest=digest(payload))
        signed = replace(sent, signature=SimulatedSigner(self.me).sign(statement(sent)))
        return replace(honest, payload=payload, sents=(signed, *others))


@lie
class Feeder(FalseSender):
    """counts nothing, and answers with the other sign whoever feeds it"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        return (replace(message, wants=NONE) if isinstance(message, MemberState) else message,)


@lie
class Reducer(FalseWork):
    """hands out the sums that it reduces with the other sign"""

    share, found_by = 0.0, "sum"

    def bend(self, engine: SimulatedEngine) -> Any:
        async def reduce(contributions: Any, start: int, stop: int, *, hop: int = 0) -> Any:
            reduced = await engine.reduce(contributions, start, stop, hop=hop)
            if not self.lying:
                return reduced
            self.lies_told += 1
            values = memoryview(bytes(reduced.packed.data)).cast("q")
            # The last element counts microbatches: nobody would believe another one.
            false = [value if start + at >= NUM_ELEMENTS - 1 else -value for at, value in enumerate(values)]
            data = b"".join(value.to_bytes(8, "little", signed=True) for value in false)
            return replace(reduced, packed=replace(reduced.packed, data=data))

        return Bent(engine, reduce=reduce)


@lie
class Auditor(FalseWork):
    """finds something wrong whenever it looks at others' work again"""

    share, found_by = 0.0, "jury"

    def bend(self, engine: SimulatedEngine) -> Any:
        again: Any = engine

        async def recompute(*works: Any) -> Any:
            found, root = await again.recompute(*works)
            if not self.lying:
                return found, root
            return tuple(replace(each, loss_sum=each.loss_sum + 1.0) for each in found), hashlib.sha256(root).digest()

        return Bent(engine, recompute=recompute)


@lie
class Accuser(Auditor):
    """looks at every third microbatch again, drawn or not, and finds something wrong with each"""

    def manifest(self, honest: Manifest) -> Manifest:
        """Its own rates: it looks at far more than it is drawn for."""
        return honest.model_copy(update={"audit": Audits(microbatches=0.3, contributions=0.3)})
