"""What rounds sum with `averaging.sync = "local"`, and the step that follows, in the place of `stage.step_sum`.

Nobody's gradient travels. Each replica steps with what it has accumulated itself, averaged over its own tokens. A
round sums one number, the length of each member's own sum: so every stage knows how long gradients are in the others,
and a replica clips its own by the norm over all stages. When the plan says so, the round first carries a vector of
pseudo-gradients (`stage.outer`), weighted as the ledger weighs its members in this step. It moves the slow weights,
the weights go on from there, and then comes the own gradient, which was computed one step before (as in Streaming
DiLoCo, arXiv:2501.18512, with a delay of one).

With `partners = "all"` both vectors are what everybody holds in the end. With "pairs" the first is a plain mean among
partners: it is no part of the digest, nobody can fetch it later, and who does not get it keeps its own for the next
time. Knows no peers. Compute thread only, but for what a round looks like.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import RoundId
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Commit, Packed
from swarmnet.stage import snapshot
from swarmnet.stage.backend import GradientSum, State
from swarmnet.stage.engine import Contribution, OuterStep, Reduced
from swarmnet.stage.outer_plan import OuterPlan, Range
from swarmnet.stage.reducer import PartReducer
from swarmnet.stage.step_sum import blameless, check_codec, check_part, codec_of
from swarmnet.stage.sum_buffer import SumBuffer
from swarmnet.wire import codecs

_LENGTHS = 1
"""Elements of the vector that every round sums last."""


class LocalSum:
    """The rounds of one stage, always of the version that `state` is at.

    Positions count through all `phases`: the elements of an outer step at this version, if any, then the one number.
    Raises as `StepSum` does.
    """

    def __init__(self, manifest: Manifest, state: State, accumulator: GradientSum, *, device: torch.device) -> None:
        assert state.outer is not None
        averaging, training = manifest.averaging, manifest.training
        self._manifest, self._state, self._accumulator, self._outer = manifest, state, accumulator, state.outer
        self._canonical = state.canonical
        self._plan = OuterPlan(
            state.canonical.num_elements,
            averaging.inner_steps,
            averaging.fragments,
            training.total_steps,
            averaging.outer_warmup_steps,
        )
        self._gossip = averaging.partners == "pairs"
        self._device = device
        self._tokens_each = training.microbatch_size * training.sequence_length
        self._codec = codec_of(averaging.codec, state.canonical, device)
        self._reducer, self._length_reducer = PartReducer(manifest), PartReducer(manifest, codec="fp32")
        self._centers: dict[Range, Tensor] = {}  # the last mean of each fragment, where the reducer asks for it
        self._forgotten = 0  # how often what the codec owes was dropped
        self._lengths = SumBuffer(_LENGTHS, dtype=torch.float32, device=torch.device("cpu"))
        self._exchanged = SumBuffer(0, dtype=torch.float32, device=device)
        self._arriving = self._exchanged
        self._version = -1  # the version the finished sum leads on from
        self._round: RoundId | None = None  # the round that I take part in, or took part in last
        self._counted: frozenset[int] = frozenset()  # what my accumulator held as it began
        self._voids = 0
        self._phase = 0
        self._mine: Tensor | None = None  # my vector in that round, over all elements
        self._length: Tensor | None = None
        self._reached: RoundId | None = None  # the round whose mean among partners is whole here

    # ------------------------------------------------------------ what a round looks like

    @property
    def due(self) -> Range | None:
        """The elements of which the round of this version takes an outer step."""
        return self._plan.due(self._state.version)

    @property
    def phases(self) -> tuple[int, ...]:
        """Lengths of the vectors that the round of this version sums."""
        return (*self._outer_phases, _LENGTHS)

    @property
    def private_phases(self) -> int:
        """How many of `phases`, from the first, are summed among partners only."""
        return len(self._outer_phases) if self._gossip else 0

    @property
    def sum_elements(self) -> int:
        """Length of the finished sum of this version: what everybody holds in the end."""
        start, stop = (0, 0) if self._gossip else self.due or (0, 0)
        return stop - start + _LENGTHS

    @property
    def block(self) -> int:
        return self._codec.block

    @property
    def _outer_phases(self) -> tuple[int, ...]:
        due = self.due
        if due is None:
            return ()
        whole = due == (0, self._canonical.num_elements)
        return self._codec.phases if whole else (due[1] - due[0],)

    # ------------------------------------------------------------ taking part in a round

    def begin(self, round_id: RoundId, *, resent: bool = False, kept: Collection[tuple[int, int, int]] = ()) -> None:
        """What is contributed and reduced from now on is so in that round, of which the accumulator is as it is now."""
        self._codec.begin(round_id, voids=self._forgotten)
        self._round, self._phase, self._reached = round_id, 0, None
        self._counted, self._voids = self._accumulator.indexes(self._state.version), self._accumulator.voids
        self._mine = self._length = None

    def contribution(self, start: int, stop: int) -> Packed:
        """Positions [start, stop) of what I give."""
        check_part(start, stop, sum(self.phases))
        edge = sum(self._outer_phases)
        with blameless(self._canonical.stage):
            if start >= edge:
                if self._length is None:
                    own = self._accumulator.read(self._state.version)
                    self._length = torch.tensor([math.sqrt(self._canonical.square_norm(own))])
                return codecs.encode("fp32", self._length[start - edge : stop - edge].clone())
            shift = self._shift
            return self._codec.contribution(self._vector(), start + shift, stop + shift, voids=self._forgotten)

    def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int = 0) -> Reduced:
        """Reduce contributions in the order given. Between partners to their mean, else to their sum."""
        edge = sum(self._outer_phases)
        if start >= edge:
            total, clipped = self._length_reducer(contributions, stop - start, hop=hop)
            with blameless(self._canonical.stage):
                return Reduced(codecs.encode("fp32", total), clipped)
        center = self._centers.get(self.due or (0, 0))
        about = None if center is None else center[start:stop]
        total, clipped = self._reducer(contributions, stop - start, about, hop=hop)
        if self._gossip:
            total.div_(sum(contribution.num_microbatches for contribution in contributions))
        with blameless(self._canonical.stage):
            return Reduced(self._codec.sum(total, start + self._shift, voids=self._forgotten, hop=hop), clipped)

    def open(self) -> None:
        """Another sum comes: what was there is gone."""
        start, stop = self.due or (0, 0)
        self._lengths.open()
        if self._exchanged.flat.numel() != stop - start:
            self._exchanged = SumBuffer(stop - start, dtype=torch.float32, device=self._device)
        self._exchanged.open()
        self._arriving = self._codec.buffer(self._exchanged)
        self._arriving.open()
        self._version = -1

    def put(self, start: int, packed: Packed) -> None:
        """Decode a reduced piece, its first element at position `start`."""
        edge, size = sum(self._outer_phases), codecs.num_elements(packed.shape)
        check_codec(packed, "fp32" if start >= edge else self._codec.reduced)
        buffer, start = (self._lengths, start - edge) if start >= edge else (self._arriving, start)
        codecs.decode_into(buffer.place(start, size), packed)
        buffer.written(start, size)

    def next_phase(self) -> None:
        """A vector was put whole, and another is to be summed."""
        self._phase += 1
        if self._phase < len(self._outer_phases):
            with blameless(self._canonical.stage):
                self._codec.next_phase(voids=self._forgotten)
        elif self._gossip:
            self._exchanged.seal()
            self._reached = self._round

    def seal(self) -> tuple[bytes, float]:
        """Everything was put: the digest of what everybody holds, and its measure."""
        if self.due is not None:
            with blameless(self._canonical.stage, only=RejectCode.NON_FINITE):
                self._codec.finish(self._exchanged)
        return self._sealed()

    # ------------------------------------------------------------ finished sums

    def install(self, parts: Sequence[Packed]) -> tuple[bytes, float]:
        """Take over a sum that others have finished, all of it or none. From a partner there is nothing to take."""
        if sum(codecs.num_elements(packed.shape) for packed in parts) != self.sum_elements:
            raise BadMessage(RejectCode.BAD_SHAPE, "parts do not cover the sum", count=len(parts))
        decoded = []
        for packed in parts:
            check_codec(packed, "fp32")
            decoded.append(codecs.decode(packed, expect_shape=(codecs.num_elements(packed.shape),)))
        flat = torch.cat(decoded)
        edge = flat.numel() - _LENGTHS
        if self._gossip:  # what my partner and I have agreed on stays
            self._lengths.open()
        else:
            self.open()
            self._exchanged.place(0, edge).copy_(flat[:edge])
            self._exchanged.written(0, edge)
        self._lengths.place(0, _LENGTHS).copy_(flat[edge:])
        self._lengths.written(0, _LENGTHS)
        return self._sealed()

    def finished(self, start: int, stop: int) -> Packed:
        """Elements [start, stop) of the finished sum, losslessly."""
        shared = [] if self._gossip else [self._exchanged.flat]
        edge = sum(flat.numel() for flat in shared)
        check_part(start, stop, edge + _LENGTHS)
        pieces = [flat[start : min(stop, edge)].cpu() for flat in shared if start < edge]
        if stop > edge:
            pieces.append(self._lengths.flat[max(start, edge) - edge : stop - edge])
        return codecs.encode("fp32", torch.cat(pieces) if pieces else torch.zeros(0))

    # ------------------------------------------------------------ steps

    def apply(self, commits: Sequence[Commit]) -> OuterStep | None:
        """The outer step, if one is due, then my own gradient's; `state` is a version further."""
        if self._version != self._state.version:
            raise ValueError(f"no finished sum of version {self._state.version} is installed")
        commit, due = commits[self._canonical.stage], self.due
        mine = commit.id == self._round and bool(self._counted)
        own = self._own(commit.step) if mine else None
        outer = None if due is None else self._outer_step(commit, due)
        if own is not None:
            self._state.apply(own, commits, own_tokens=len(self._counted) * self._tokens_each)
        else:
            self._state.stay(commits)
        self._round, self._reached, self._mine, self._length = None, None, None, None
        return outer

    def _own(self, step: int) -> Tensor | None:
        """What my accumulator holds, if that is what it held in the round."""
        if self._accumulator.voids != self._voids or self._accumulator.indexes(step) != self._counted:
            return None
        try:
            return self._accumulator.read(step)
        except Refused:  # lost, with the ranks that held it
            return None

    def _outer_step(self, commit: Commit, due: Range) -> OuterStep:
        start, stop = due
        missed = self._missed(commit)
        if self._gossip and missed:
            self._codec.applied(None, voids=self._forgotten)
            return OuterStep(elements=stop - start, moved=0.0, missed=missed)
        mean = self._exchanged.flat
        if not self._gossip:
            mean = mean / (self._manifest.training.microbatches - len(commit.voided))
        moved = self._outer.step(mean, start, mine=not missed, plain=self._plan.plain(commit.step))
        if self._reducer.needs_center and not self._gossip:
            self._centers[due] = mean.cpu()
        self._codec.applied(commit.id, voids=self._forgotten)
        return OuterStep(elements=stop - start, moved=moved, missed=missed)

    def _missed(self, commit: Commit) -> str:
        """Why my vector is not in the outer step of that round; empty if it is."""
        if self._gossip and commit.id != self._round:
            return "was no member of the round to the end"
        if self._gossip:
            return "" if self._reached == commit.id else "did not get its partners' mean"
        if commit.id != self._round:
            return "collected the sum instead of taking part"
        return "" if self._counted else "counted nothing in this step"

    def changed(self) -> None:
        """The state is another: no sum of mine leads on from it."""
        self._version, self._round, self._reached = -1, None, None
        self._centers.clear()
        self._forgotten += 1

    # ------------------------------------------------------------ what only this replica knows

    def memory(self) -> dict[str, Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._codec.memory.items()}

    def recall(self, data: bytes | memoryview) -> None:
        shapes = {name: tensor.shape for name, tensor in self._codec.memory.items()}
        saved = snapshot.unpack(data, shapes, stage=self._canonical.stage, version=self._state.version)
        self._codec.recall(saved, voids=self._forgotten)

    # ------------------------------------------------------------ inside

    @property
    def _shift(self) -> int:
        """From a position in the round to one among all elements."""
        return 0 if self.due is None else self.due[0]

    def _vector(self) -> Tensor:
        """What I give to the outer step, over all elements, of which only those that are due are there: my vector, as
        often as I have counted microbatches; between partners once."""
        if self._mine is None:
            assert self.due is not None
            start, stop = self.due
            self._mine = torch.empty(self._canonical.num_elements, dtype=torch.float32, device=self._device)
            self._mine[start:stop] = self._outer.vector(start, stop, plain=self._plan.plain(self._state.version))
            if not self._gossip:
                self._mine[start:stop] *= len(self._counted)
        return self._mine

    def _sealed(self) -> tuple[bytes, float]:
        digest = hashlib.sha256(self._lengths.seal())
        if self.due is not None and not self._gossip:
            digest.update(self._exchanged.seal())
        self._version = self._state.version
        return digest.digest(), float(self._lengths.flat[0].item()) ** 2
