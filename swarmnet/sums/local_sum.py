"""What rounds sum with `averaging.sync = "local"`, and the step that follows; replaces `sums.step_sum` there.

Gradients do not travel. Each replica steps with its own accumulated gradient, averaged over its own tokens. A round
sums one number, the squared length of each member's own gradient: so every stage knows how long gradients are in the
others, and a replica clips its own by the norm over all stages. When the plan says so, the round first carries a vector
of pseudo-gradients (`stage.outer`), weighted by the microbatches assigned to its members in this step. It moves the
outer weights, the weights continue from there, and then the replica applies its own gradient, which was computed one
step before (as in Streaming DiLoCo, arXiv:2501.18512, with a delay of one).

With `partners = "all"` every replica ends with the same two vectors. With "pairs" the first is a plain mean within a
gossip group: it is not part of the digest and cannot be fetched later, and a replica that does not get it applies its
own vector at the next outer step. Knows no peers.

`OuterPlan` decides which elements take an outer step when. The flat weights of a stage are cut into contiguous
fragments, each of which takes one every `inner_steps` steps; the fragments' outer steps are spread evenly over that
time, so that the traffic is. With one fragment all elements take it at the same time (DiLoCo, arXiv:2311.08105). In the
last step all fragments take one, due or not: a run ends with what all its replicas have learned.

Under a `sparse` codec a replica sends the largest elements of its pseudo-gradient. What it does not send stays in its
weights (SparseLoCo, arXiv:2508.15706, stores it in a vector of its own and resets the weights: then the replica learns
again what it still has to send, and both arrive). Plain outer steps and the last one of a run send everything, in int8.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarmnet.engine.compute_thread import StageJobs
from swarmnet.engine.payloads import blameless, check_codec
from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import RoundId
from swarmnet.messages import Commit, Packed
from swarmnet.stage.accumulator import GradientSum
from swarmnet.stage.interfaces import Contribution, OuterStep, Reduced
from swarmnet.stage.state import State
from swarmnet.sums.reducer import float_sum, rule_of
from swarmnet.sums.references import TURNS, References
from swarmnet.sums.step_sum import RoundSum, check_part, in_round
from swarmnet.sums.sum_buffer import SumBuffer
from swarmnet.sums.sum_codec import SumCodec
from swarmnet.wire import codecs
from swarmnet.wire.codec import MAX_BLOCK, num_elements

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class OuterPlan:
    """The outer steps of one stage of `num_elements`. fragments <= inner_steps: no two have the same turn."""

    num_elements: int
    inner_steps: int
    fragments: int
    total_steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.inner_steps:
            raise ValueError(f"{self.fragments} fragments have no turns of their own in {self.inner_steps} steps")

    def fragment(self, number: int) -> Range:
        """Elements [start, stop) of one fragment. Together they are all elements, in order."""
        start, stop = (self.num_elements * edge // self.fragments for edge in (number, number + 1))
        return start, stop

    def due(self, step: int) -> Range | None:
        """The elements of which the round of `step` takes an outer step; None: this is an inner step only.

        Never in step 0: all weights are still equal.
        """
        if step == 0:
            return None
        # The run ends with what all its replicas have learned.
        if step == self.total_steps - 1:
            return 0, self.num_elements
        turn = step % self.inner_steps
        number = -(-turn * self.fragments // self.inner_steps)  # the only one that could have this turn
        if number < self.fragments and turn == self._turn(number):
            return self.fragment(number)
        return None

    def turn(self, step: int) -> int:
        """How many outer steps a fragment has taken before that step's."""
        return (step - 1) // self.inner_steps

    def plain(self, step: int) -> bool:
        """Is an outer step here still plain (`stage.outer`)?"""
        return step <= self.warmup_steps

    def sends_all(self, step: int) -> bool:
        """Does an outer step here send all elements, even under a sparse codec?"""
        return self.plain(step) or step == self.total_steps - 1

    def _turn(self, number: int) -> int:
        """Fragment 0 goes with the full rounds of inner steps, the others in between."""
        return number * self.inner_steps // self.fragments


_LENGTHS = 1
"""Elements of the vector that every round sums last."""

_CHUNK = 1 << 14
"""Elements that are encoded at a time where nothing is sent: whole blocks, and few compared with a stage's."""

DENSE = "int8"
"""How a run with a sparse codec sends all elements."""


class LocalSum(RoundSum):
    """The rounds of one stage, always of the version that `state` is at.

    Positions count through all `phases`: the elements of an outer step at this version, if any, then the one number.
    Raises as `StepSum` does.
    """

    def __init__(self, jobs: StageJobs, state: State, accumulator: GradientSum, *, device: torch.device) -> None:
        assert state.outer is not None
        averaging, training = state.canonical.spec.averaging, state.canonical.spec.training
        self._gossip = averaging.gossip
        super().__init__(jobs, state)
        # What partners send is encoded relative to their references, without error feedback.
        codec = "fp32" if self._gossip else averaging.codec
        self.codec = SumCodec(codec, state.canonical.num_elements, device=device)
        self._references = References(averaging.codec)
        self._training, self._accumulator, self._outer = training, accumulator, state.outer
        self._manifests_plan = OuterPlan(
            state.canonical.num_elements,
            averaging.inner_steps,
            averaging.fragments,
            training.total_steps,
            averaging.outer_warmup_steps,
        )
        self._device = device
        self._tokens_each = training.microbatch_size * training.sequence_length
        self._rule = rule_of(averaging)
        self._dense = self.codec
        if averaging.sparse:
            self._dense = SumCodec(DENSE, self.num_elements, device=device)
        self._centers: dict[Range, Tensor] = {}  # the last mean of each fragment, where the reducer asks for it
        self._lengths = SumBuffer(torch.zeros(_LENGTHS))
        self._exchanged = SumBuffer(torch.zeros(0, device=device))
        self._version = -1  # the version the finished sum leads on from
        self._edge = 0  # the position of its one number
        self._round: RoundId | None = None  # the round that I take part in, or took part in last
        self._counted: frozenset[int] = frozenset()  # what my accumulator held as it began
        self._discards = 0
        self._mine: Tensor | None = None  # my vector in that round, over all elements
        self._length: Tensor | None = None

    # ------------------------------------------------------------ what a round looks like

    @property
    def _plan(self) -> OuterPlan:
        # A notice that begins at this step comes with its commit: the round knew nothing of it.
        last = self.canonical.horizon.before(self.state.version).last
        return replace(self._manifests_plan, total_steps=last)

    @property
    def due(self) -> Range | None:
        """The elements of which the round of this version takes an outer step."""
        return self._plan.due(self.state.version)

    @property
    def phases(self) -> tuple[int, ...]:
        """Lengths of the vectors that the round of this version sums."""
        return (*self._outer_phases, _LENGTHS)

    @property
    def private_phases(self) -> int:
        """How many of `phases`, from the first, are summed among partners only."""
        return len(self._outer_phases) if self._gossip else 0

    @property
    def draw(self) -> tuple[int, int]:
        """(size, turn): how partners are drawn."""
        return self._gossip, self._plan.turn(self.state.version) % TURNS

    @property
    def reference(self) -> bytes:
        """Digest of what my partners and I agreed on last; empty: of nothing, or nothing is sent among partners."""
        return self._references.digest if self.private_phases else b""

    @property
    def block(self) -> int:
        """Of the run's codec."""
        return codecs.find(self.canonical.spec.averaging.codec).block

    @property
    def element_bytes(self) -> float:
        """At most, of the run's codec."""
        return codecs.encoded_bytes(self.canonical.spec.averaging.codec, (MAX_BLOCK,)) / MAX_BLOCK

    @property
    def _outer_phases(self) -> tuple[int, ...]:
        return () if self.due is None else (self.due[1] - self.due[0],)

    # ------------------------------------------------------------ taking part in a round

    @in_round
    def open_round(self, round_id: RoundId) -> None:
        """Open that round: later contributions and reductions belong to it, and the accumulator counts as it is now."""
        self.codec.begin(round_id)
        self._round = round_id
        self._counted, self._discards = self._accumulator.indexes(self.state.version), self._accumulator.discards
        self._mine = self._length = None
        # All weights are still the initial ones: every replica holds the same.
        if self._gossip and self.state.version == 0:
            self._references.begin(self._outer.slow)
        if self._gossip and self.due is not None:
            cycle, turn = divmod(self._plan.turn(self.state.version), TURNS)
            self._references.open(turn, self.due, first=not cycle)
            self._open_exchanged()

    @in_round
    def contribution(self, start: int, stop: int, reference: bytes = b"") -> Packed:
        """Positions [start, stop) of what I give; a difference to who asks by the same reference.

        Raises Refused(NOT_READY) as `StepSum.contribution` does.
        """
        check_part(start, stop, sum(self.phases))
        if self._accumulator.discards != self._discards:
            raise Refused(RejectCode.NOT_READY, "the sum was discarded in the round", step=self.state.version)
        edge = sum(self._outer_phases)
        with blameless(self.canonical.stage):
            # After the outer vector comes the one number, the length of this member's own gradient.
            if start >= edge:
                if self._length is None:
                    own = self._accumulator.read(self.state.version)
                    self._length = torch.tensor([math.sqrt(self.state.square_norm(own))])
                return codecs.encode("fp32", self._length[start - edge : stop - edge].clone())
            shift = self._shift
            if self._gossip:
                vector, whole = self._vector()[start + shift : stop + shift], reference != self.reference
                return self._references.encode(vector, start, whole=whole)
            return self._in_use.contribution(self._vector(), start + shift, stop + shift)

    @in_round
    def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int = 0) -> Reduced:
        """Reduce contributions in the order given. Between partners to their mean, else to their sum."""
        edge = sum(self._outer_phases)
        if start >= edge:
            total, clipped = float_sum(self._rule, contributions, stop - start, codec="fp32")
            with blameless(self.canonical.stage):
                return Reduced(codecs.encode("fp32", total), clipped)
        if self._gossip:
            vectors = [self._opened(contribution, start, stop) for contribution in contributions]
            total, clipped = float_sum(self._rule, vectors, stop - start, codec="fp32")
            # Partners install a mean, so what each of them weighs is divided out.
            total.div_(sum(contribution.num_microbatches for contribution in contributions))
            # A member that sent a difference has the reference; a difference is sent only to a group where all have it.
            whole = any(self._references.is_whole(contribution.packed) for contribution in contributions)
            with blameless(self.canonical.stage):
                return Reduced(self._references.encode(total, start, whole=whole), clipped)
        center = self._centers.get(self.due or (0, 0))
        about = None if center is None else center[start:stop]
        # After the first hop contributions are what others have reduced.
        codec = self._in_use.reduced if hop else self._in_use.contributed
        total, clipped = float_sum(self._rule, contributions, stop - start, about, codec=codec)
        with blameless(self.canonical.stage):
            return Reduced(self._in_use.sum(total, start + self._shift, hop=hop), clipped)

    @in_round
    def open_sum(self) -> None:
        """Empty the sum buffers for another sum. The partners' mean is no part of it, and stays."""
        self._lengths.open()
        if not self._gossip:
            self._open_exchanged()
        # It is read in later versions too, which sum other phases.
        self._version, self._edge = -1, sum(self._outer_phases)

    def _open_exchanged(self) -> None:
        start, stop = self.due or (0, 0)
        if self._exchanged.flat.numel() != stop - start:
            self._exchanged = SumBuffer(torch.zeros(stop - start, device=self._device))
        self._exchanged.open()

    @in_round
    def put(self, start: int, packed: Packed) -> None:
        """Decode a piece, its first element at position `start`. A finished sum is fp32, like the one number."""
        edge, size = sum(self._outer_phases), num_elements(packed.shape)
        if self._gossip and start < edge:
            vector = self._references.decode(packed, start, size)
        else:
            check_codec(packed, "fp32", *((self._in_use.reduced,) if start < edge else ()))
            vector = codecs.decode(packed, expect_shape=(size,))
        # A piece of a finished sum may reach across the edge.
        outer, lengths = vector[: max(edge - start, 0)], vector[max(edge - start, 0) :]
        for buffer, first, piece in (self._exchanged, start, outer), (self._lengths, max(start - edge, 0), lengths):
            if piece.numel():
                buffer.slot(first, piece.numel()).copy_(piece)
                buffer.written(first, piece.numel())

    @in_round
    def seal(self) -> tuple[bytes, float]:
        """Everything was put: the digest of what all replicas hold, and its measure."""
        digest = hashlib.sha256(self._lengths.seal())
        if self.due is not None and not self._gossip:
            digest.update(self._exchanged.seal())
        self._version = self.state.version
        return digest.digest(), float(self._lengths.flat[0].item()) ** 2

    # ------------------------------------------------------------ finished sums

    @property
    def travel_bytes(self) -> float:
        """The mean over steps: each element takes an outer step once in so many."""
        return 4.0 * (_LENGTHS if self._gossip else self.num_elements / self._plan.inner_steps)

    @in_round
    def finished_sum(self, start: int, stop: int) -> Packed:
        """Positions [start, stop) of the finished sum, losslessly."""
        edge = self._edge
        check_part(start, stop, edge + _LENGTHS)
        # What partners agreed on is theirs.
        if self._gossip and start < edge:
            raise BadMessage(RejectCode.BAD_SHAPE, "no part of the finished sum", start=start, stop=stop)
        outer = self._exchanged.flat[start : min(stop, edge)].cpu()
        lengths = self._lengths.flat[max(start - edge, 0) : max(stop - edge, 0)]
        return codecs.encode("fp32", torch.cat([outer, lengths]))

    # ------------------------------------------------------------ steps

    def apply(self, commits: Sequence[Commit]) -> OuterStep | None:
        """The outer step, if one is due, then my own gradient's; `state` is a version further."""
        if self._version != self.state.version:
            raise ValueError(f"no finished sum of version {self.state.version} is installed")
        commit, due = commits[self.canonical.stage], self.due
        # What I counted is in this commit only if it is of the round that I took part in.
        mine = commit.id == self._round and bool(self._counted)
        own = self._own(commit.step) if mine else None
        outer = None if due is None else self._outer_step(commit, due)
        if own is not None:
            self.state.apply(own, commits, own_tokens=len(self._counted) * self._tokens_each)
        else:
            # The version counts up all the same, or this replica would fall behind.
            self.state.stay(commits)
        self._round, self._mine, self._length = None, None, None
        return outer

    def _own(self, step: int) -> Tensor | None:
        """What my accumulator holds, if that is what it held in the round."""
        if self._accumulator.discards != self._discards or self._accumulator.indexes(step) != self._counted:
            return None
        try:
            return self._accumulator.read(step)
        except Refused:  # lost, with the ranks that held it
            return None

    def _outer_step(self, commit: Commit, due: Range) -> OuterStep:
        start, stop = due
        missed = self._missed(commit)
        # Without the partners' mean the weights go on alone until the next outer step.
        if self._gossip and missed:
            self.codec.applied(None)
            return OuterStep(elements=stop - start, moved=0.0, missed=missed)
        mean = self._exchanged.flat
        if not self._gossip:
            # A sum over the counted microbatches becomes their mean.
            mean = mean / (self._training.microbatches - len(commit.discarded))
        else:
            self._references.agreed(self.draw[1], due, mean)
        unsent = self._unsent(due) if not (missed or self._sends_all) else None
        moved = self._outer.step(mean, start, mine=not missed, unsent=unsent, plain=self._plan.plain(commit.step))
        if self._rule is not None and self._rule.needs_center and not self._gossip:
            self._centers[due] = mean.cpu()
        self.codec.applied(commit.id)
        return OuterStep(elements=stop - start, moved=moved, missed=missed)

    def _missed(self, commit: Commit) -> str:
        """Why my vector is not in that outer step, for people; empty if it is."""
        if self._gossip and commit.id != self._round:
            return "was no member of the round to the end"
        if self._gossip:
            return "" if self._exchanged.is_whole else "did not get its partners' mean"
        if commit.id != self._round:
            return "collected the sum instead of taking part"
        return "" if self._counted else "counted nothing in this step"

    def changed(self) -> None:
        """The state is another: no sum of mine leads on from it."""
        self._version, self._round = -1, None
        self._centers.clear()
        self._references.forget()
        self.codec.forget()

    # ------------------------------------------------------------ inside

    @property
    def _sends_all(self) -> bool:
        return not self.canonical.spec.averaging.sparse or self._plan.sends_all(self.state.version)

    @property
    def _in_use(self) -> SumCodec:
        """The codec of the outer step of this version."""
        return self._dense if self._sends_all else self.codec

    @property
    def _shift(self) -> int:
        """From a position in the round to one among all elements."""
        return 0 if self.due is None else self.due[0]

    def _opened(self, contribution: Contribution, start: int, stop: int) -> Contribution:
        """A partner's vector itself. What is none becomes an empty one, which the reducer refuses or leaves out."""
        try:
            vector = self._references.decode(contribution.packed, start, stop - start)
        except BadMessage:
            vector = torch.zeros(0)
        return replace(contribution, packed=codecs.encode("fp32", vector))

    def _vector(self) -> Tensor:
        """My input to the outer step, in memory for all elements of which only those that are due are set.

        It is my vector times the microbatches that I counted; between partners, the vector itself.
        """
        if self._mine is None:
            assert self.due is not None
            start, stop = self.due
            self._mine = torch.empty(self.num_elements, dtype=torch.float32, device=self._device)
            self._mine[start:stop] = self._outer.vector(start, stop, plain=self._plan.plain(self.state.version))
            if not self._gossip:
                self._mine[start:stop] *= len(self._counted)
        return self._mine

    def _unsent(self, due: Range) -> Tensor:
        """What the others have not got of my vector, computed in its memory. None of it counts as sent twice, because
        what is encoded depends neither on how a round cut it nor on how often."""
        vector = self._vector()[slice(*due)]
        for piece in torch.split(vector, _CHUNK):
            piece.sub_(codecs.decode(codecs.encode(self.canonical.spec.averaging.codec, piece), device=piece.device))
        return vector.div_(len(self._counted))
