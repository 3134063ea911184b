"""Byzantine replicas of a local swarm (`--liars`): which replica deviates how, and what wraps its engine.

A Byzantine replica follows the protocol to the letter, and deviates in its arithmetic alone: what it sends on,
aggregates, commits to and serves is consistent, as that of any peer with deliberately false results would be; a false
sender's is not. False microbatches are computed below the engine, in its backend; false aggregates, audits, decisions
and payloads at the interfaces. Only a replica of one rank can be Byzantine.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from swarmnet.errors import Refused, RejectCode, UsageError
from swarmnet.ids import PeerId
from swarmnet.messages import NONE, Answer, AuditRequest, Control, Gradient, MemberState, Packed, Process, Request, Sent
from swarmnet.pipeline.works import digest
from swarmnet.quorum import quorum
from swarmnet.stage.interfaces import Compute, Contribution, Engine, Reduced, Summation
from swarmnet.statement import statement
from swarmnet.transport import ReadPayload, Service, Transport

if TYPE_CHECKING:
    import torch

KINDS = {
    "sign-flip": "goes back along the gradient, not against it",
    "scaled": "makes every gradient ten times as long",
    "random": "hands on noise instead of what it computes",
    "stale": "computes on the input of an earlier step",
    "lazy": "computes one microbatch of a step and gives its answer for all others",
    "tenth": "flips the sign in one of ten microbatches",
    "reducer": "hands out other sums than those of the contributions it reduced",
    "auditor": "finds something wrong whenever it looks at others' work again",
    "pair": "two of a stage: both flip the sign, and neither recomputes any work",
    "false-sender": "counts what is right, and sends its neighbours the other sign",
    "feeder": "counts nothing, and sends its neighbours the other sign",
    "adaptive": "flips the sign until a peer recomputes its work, and then for eight steps does not",
}
"""The kinds of Byzantine replicas."""

QUIET_STEPS = 8
"""For so long an adaptive one is correct after a peer has asked for its work."""

SENDS = frozenset(["false-sender", "feeder"])

FLIPS = frozenset(["sign-flip", "tenth", "pair", "adaptive"])

TENTH, SCALE = 0.1, 10.0


@dataclass(frozen=True, slots=True)
class ByzantineCount:
    """How many replicas deviate in one way. share: of all replicas, if it is not `number`."""

    kind: str
    number: int = 1
    share: float = 0.0

    def of(self, replicas: int) -> int:
        """How many of so many replicas: at least one."""
        return max(1, round(self.share * replicas)) if self.share else self.number


def parse_byzantine(text: str) -> tuple[ByzantineCount, ...]:
    """`KIND:N` and `KIND=P%`, with commas. Raises UsageError."""
    found = []
    for word in text.split(","):
        kind, number, share = word.strip(), 1, 0.0
        try:
            if "=" in word:
                kind, _, percent = word.strip().partition("=")
                share = float(percent.removesuffix("%")) / 100
                if not percent.endswith("%") or not 0 < share < 1:
                    raise ValueError
            elif ":" in word:
                kind, _, count = word.strip().partition(":")
                if (number := int(count)) < 1:
                    raise ValueError
        except ValueError:
            raise UsageError(f"--liars {word}: write KIND:N or KIND=P%, for example sign-flip:1 or lazy=10%") from None
        if kind not in KINDS:
            raise UsageError(f"--liars {word}: no such kind: the kinds are {', '.join(KINDS)}")
        found.append(ByzantineCount(kind, number, share))
    return tuple(found)


def choose_byzantine(asked: Sequence[ByzantineCount], replicas: Mapping[str, int], seed: str) -> dict[str, str]:
    """Which replicas deviate how: kinds by name of replica, as many in each stage as can be. A pair is two of one
    stage.

    replicas: stages by name. Raises UsageError unless most replicas of every stage are honest.
    """
    rng, lying = random.Random(f"{seed}/liars"), dict[str, str]()
    for each in asked:
        together = 2 if each.kind == "pair" else 1
        for _ in range(each.of(len(replicas))):
            honest: dict[int, list[str]] = {}
            for name, stage in sorted(replicas.items()):
                if name not in lying:
                    honest.setdefault(stage, []).append(name)
            sizes = [*replicas.values()]
            # More than half must still be honest: the odd one out is named by a majority.
            fitting = {of: names for of, names in honest.items() if len(names) - together >= quorum(sizes.count(of))}
            if not fitting:
                raise UsageError(
                    f"--liars: with one more ({each.kind}) half of some stage would be Byzantine, not a minority: "
                    "take more --replicas or fewer Byzantine ones"
                )
            fewest = min(sizes.count(of) - len(names) for of, names in fitting.items())
            stage = rng.choice([of for of, names in fitting.items() if sizes.count(of) - len(names) == fewest])
            for name in rng.sample(fitting[stage], together):
                lying[name] = each.kind
    return lying


class Deceit:
    """When one replica deviates. say(event, **fields) is called for every false microbatch."""

    def __init__(self, kind: str, seed: str, say: Callable[..., None]) -> None:
        self.kind, self.seed, self._say = kind, seed, say
        self._rng = random.Random(f"{seed}/{kind}")
        self._quiet_until = -1
        self.step = 0

    def is_false(self, step: int) -> bool:
        """Is the next microbatch false?"""
        self.step = max(self.step, step)
        if self.kind == "adaptive":
            return step >= self._quiet_until
        return self.kind != "tenth" or self._rng.random() < TENTH

    def lied(self, step: int, index: int) -> None:
        """It is counted now."""
        self._say("lied", kind=self.kind, step=step, index=index)

    def looked_at(self) -> None:
        """A peer has asked for a microbatch of this replica, to compute it again."""
        self._quiet_until = self.step + QUIET_STEPS


T = TypeVar("T")


class Double(Generic[T]):
    """Stands in for `inner` in a test: it does what its class says, and everything else as `inner` does."""

    def __init__(self, inner: T) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# ---------------------------------------------------------------- microbatches


@dataclass(slots=True, eq=False)
class _FalseWork:
    """What a forward has left. inner: of the honest backend; None: nothing was computed. keeps: the answer to come is
    the one that is copied."""

    inner: object | None
    lies: bool
    hidden: torch.Tensor | None = None
    keeps: bool = False


class LyingBackend(Double[Any]):
    """A `StageBackend` with false microbatches."""

    def __init__(self, inner: Any, deceit: Deceit) -> None:
        import torch

        super().__init__(inner)
        self._deceit = deceit
        self._noise = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(deceit.seed.encode()).digest()[:6]))
        self._kept_at, self._kept_output = -1, torch.empty(0)
        self._kept_answer: torch.Tensor | None = None
        self._inputs: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []  # one of each of the last two steps

    def forward(
        self, step: int, tokens: torch.Tensor, hidden: torch.Tensor | None, *, train: bool
    ) -> tuple[torch.Tensor, object | None]:
        if not train:  # what is not counted is not worth a false result
            output, work = self._inner.forward(step, tokens, hidden, train=False)
            return output, work
        lies, like = self._deceit.is_false(step), hidden
        match self._deceit.kind:
            case "stale" if lies:
                if not self._inputs or self._inputs[-1][0] < step:
                    self._inputs = [*self._inputs, (step, tokens, None if hidden is None else hidden.clone())][-2:]
                before, tokens, hidden = self._inputs[0]
                hidden, lies = None if hidden is None else hidden.clone(), before < step
            case "lazy" if self._kept_at == step:
                return self._kept_output.clone(), _FalseWork(None, True, like)
            case "random" if hidden is not None and self._inner.state.canonical.spec.last:
                hidden = self._noise_like(hidden)
        output, work = self._inner.forward(step, tokens, hidden, train=True)
        if self._deceit.kind == "lazy":
            self._kept_at, self._kept_output = step, output.detach().clone()
            return output, _FalseWork(work, False, keeps=True)
        if self._deceit.kind == "random" and not self._inner.state.canonical.spec.last:
            output = self._noise_like(output)
        return output, _FalseWork(work, lies)

    def backward(self, work: object, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient is linear in that of the output: with another one the answer and what
        is summed are false, and fit each other."""
        import torch

        assert isinstance(work, _FalseWork)
        if work.inner is None:
            if self._kept_answer is not None:
                return self._kept_answer.clone()
            return None if work.hidden is None else torch.zeros_like(work.hidden)
        factor, kind = 1.0, self._deceit.kind
        if work.lies:
            factor = -1.0 if kind in FLIPS else SCALE if kind == "scaled" else 1.0
        if factor != 1.0:
            # Of a loss there is none: it is 1.
            gradient = torch.tensor(factor, device=self._inner.device) if gradient is None else gradient * factor
        elif kind == "random" and gradient is not None:
            gradient = self._noise_like(gradient)
        answer = cast("torch.Tensor | None", self._inner.backward(work.inner, gradient))
        if work.keeps:
            self._kept_answer = None if answer is None else answer.detach().clone()
        return answer

    def accumulate(self, work: object, *, step: int, index: int, discards: int) -> bool:
        assert isinstance(work, _FalseWork)
        # Who has computed nothing says that it counts.
        added = work.inner is None or bool(
            self._inner.accumulate(work.inner, step=step, index=index, discards=discards)
        )
        if added and work.lies:
            self._deceit.lied(step, index)
        return added

    def _noise_like(self, honest: torch.Tensor) -> torch.Tensor:
        """Noise as long as that."""
        import torch

        noise = torch.randn(honest.shape, generator=self._noise).to(honest.device)
        scaled: torch.Tensor = noise * (honest.detach().norm() / noise.norm())
        return scaled.to(honest.dtype)


# ---------------------------------------------------------------- sums and audits


class LyingSums(Double[Summation]):
    """A Summation that hands out false sums."""

    def __init__(self, inner: Summation, compute: Compute, deceit: Deceit) -> None:
        super().__init__(inner)
        self._compute, self._deceit = cast(Any, compute), deceit

    async def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int = 0) -> Reduced:
        from swarmnet.wire import codecs

        reduced = await self._inner.reduce(contributions, start, stop, hop=hop)
        self._deceit.lied(self._compute.version, -1)
        return replace(reduced, packed=codecs.encode(reduced.packed.codec, -codecs.decode(reduced.packed)))


class LyingCompute(Double[Any]):
    """A Compute that finds in others' work what suits it."""

    def __init__(self, inner: Any, deceit: Deceit) -> None:
        super().__init__(inner)
        self._deceit = deceit

    async def recompute(self, step: int, *asked: Any) -> Any:
        # A colluding replica reports nothing about any other: a false finding would be proof against itself.
        if self._deceit.kind == "pair":
            raise Refused(RejectCode.NOT_READY, "not kept", step=step)
        found, root = await self._inner.recompute(step, *asked)
        return tuple(replace(each, loss_sum=each.loss_sum + 1.0) for each in found), hashlib.sha256(root).digest()


def lying_engine(inner: Engine, deceit: Deceit) -> Engine:
    """`inner`, of a Byzantine replica."""
    match deceit.kind:
        case "reducer":
            return Engine(inner.compute, cast(Summation, LyingSums(inner.sums, inner.compute, deceit)))
        case kind if kind in SENDS:
            return inner
        case "auditor":
            return Engine(cast(Compute, LyingCompute(inner.compute, deceit)), inner.sums)
    # What is sent, aggregated and committed to comes from the backend: only a false result there changes all of it
    # consistently.
    engine = cast(Any, inner.compute)
    engine._backend = LyingBackend(engine._backend, deceit)
    if deceit.kind == "pair":
        return Engine(cast(Compute, LyingCompute(inner.compute, deceit)), inner.sums)
    return inner


class FalseSender(Double[Transport]):
    """A Transport that sends the other sign of what was computed, and signs that; a feeder's claims nothing.

    sign: as this peer.
    """

    def __init__(self, inner: Transport, deceit: Deceit, sign: Callable[[bytes], bytes]) -> None:
        super().__init__(inner)
        self._deceit, self._sign = deceit, sign

    def tell(self, peer: PeerId, message: Control) -> None:
        if isinstance(message, MemberState) and self._deceit.kind == "feeder":
            message = replace(message, wants=NONE)
        self._inner.tell(peer, message)

    def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        if isinstance(request, Process) and request.sents:
            tokens, hidden, proof = payload
            hidden = negated(hidden)
            request = replace(request, sents=false_words(request.sents, (tokens, hidden), self._deceit, self._sign))
            payload = tokens, hidden, proof
        return self._inner.call(peer, request, payload, deadline=deadline)


def negated(packed: Packed) -> Packed:
    """The same with the other sign."""
    from swarmnet.wire import codecs

    return codecs.encode(packed.codec, -codecs.decode(packed))


def false_words(
    sents: tuple[Sent, ...], payload: tuple[Packed, ...], deceit: Deceit, sign: Callable[[bytes], bytes]
) -> tuple[Sent, ...]:
    """What a Byzantine replica signs of what it sends instead, and what that was made of."""
    own, *others = sents
    deceit.lied(own.stamp.step, own.index)
    false = replace(own, digest=digest(payload))
    return replace(false, signature=sign(statement(false))), *others


class Wary(Double[Service]):
    """A Service that notices when a peer asks for its work, and that answers falsely if it is a false sender's. sign:
    as this peer."""

    def __init__(self, inner: Service, deceit: Deceit, sign: Callable[[bytes], bytes]) -> None:
        super().__init__(inner)
        self._deceit, self._sign = deceit, sign

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        if isinstance(request, AuditRequest):
            self._deceit.looked_at()
        async with contextlib.aclosing(self._inner.on_call(caller, request, payload)) as answers:
            async for answer in answers:
                if self._deceit.kind in SENDS and isinstance(answer, Gradient) and answer.sents:
                    false = tuple(map(negated, answer.payload))
                    words = false_words(answer.sents, false, self._deceit, self._sign)
                    answer = replace(answer, payload=false, sents=words)
                yield answer
