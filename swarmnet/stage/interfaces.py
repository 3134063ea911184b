"""What one replica computes with: the two interfaces between protocol and arithmetic.

`Compute` runs microbatches and holds the weights; `Summation` takes a step's gradients through a round to the finished
sum. Torch implements both on threads (`engine.torch_engine`, `sums.step_sum`), `testing.virtual_engine` on virtual
time. Neither knows peers. Step s leads from version s to s + 1; `version` counts the applied ones.

delay = 0: there are the weights of one version, one accumulator and one finished sum, for step `version`. delay = 1
(`averaging.sync = "overlap"`): the gradient of step s is that of weights s - 1 (of weights 0 for s = 0), so there are
the weights of two versions and an accumulator for each of the two open steps, `version` and `version + 1`. A round is
always about the oldest open step, `version`: there is one finished sum.

Methods with a body here are what most implementations do: those inherit from the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarmnet.ids import PeerId, RoundId
from swarmnet.manifest.extension import Notice
from swarmnet.manifest.schema import Delay
from swarmnet.messages import Commit, Packed


@dataclass(slots=True)
class SavedActivations:
    """One microbatch's work between forward, backward and weight pass. `saved` is private to the engine.

    output: what goes to the next stage, () in the last one. loss_sum (nats), num_tokens: last stage only. discards: the
    step's discard count, first as the forward was queued, then as the index was granted: the gradient counts only if
    the count has not moved since (rule 5). compute_s: compute spent on it so far. ran: when its last pass was asked
    for, began and ended on the compute thread, by the event loop's clock.
    """

    step: int
    index: int
    discards: int
    output: tuple[Packed, ...] = ()
    loss_sum: float = 0.0
    num_tokens: int = 0
    compute_s: float = 0.0
    ran: tuple[float, float, float] = (0.0, 0.0, 0.0)
    saved: object = field(default=None, repr=False)

    def computed(self, asked: float, began: float, ended: float) -> None:
        """A pass of it is over."""
        self.ran = asked, began, ended
        self.compute_s += ended - began


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one member adds to a part: a sum over as many microbatches as the *round* names for it."""

    peer: PeerId
    num_microbatches: int
    packed: Packed


@dataclass(frozen=True, slots=True)
class Clipped:
    """A member with a contribution that the reducer shortened. factor: the share of it that counted, in [0, 1)."""

    peer: PeerId
    factor: float


@dataclass(frozen=True, slots=True)
class Reduced:
    """The whole sum of a part, encoded, and whom the run's reducer clipped in it."""

    packed: Packed
    clipped: tuple[Clipped, ...] = ()


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The outer step of a version (`averaging.sync = "local"`).

    elements: how many weights took it. moved: how far they moved, relative to their length. missed: why this replica's
    pseudo-gradient was left out and kept for the next time, in words for a person; "" if it was in.
    """

    elements: int
    moved: float
    missed: str = ""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """One microbatch of an earlier step, computed again.

    output, answer: what goes to the next stage and what goes back to the one before. loss_sum, num_tokens: last stage
    only.
    """

    output: tuple[Packed, ...]
    answer: tuple[Packed, ...]
    loss_sum: float = 0.0
    num_tokens: int = 0


KEPT_WEIGHTS = 4
"""Weights of so many steps stay: a case is drawn two steps later, and others judge it after that."""

PastWork = tuple[int, Sequence[Packed], Sequence[Packed]]
"""A microbatch of a step that is over: index, input (no proof), gradient of the output."""


class Audience(Protocol):
    """Callbacks for what an engine does by itself. In the thread of the event loop that subscribed."""

    def on_sums_lost(self) -> None:
        """The sums of all open steps and all saved activations are lost. The engine has already increased the discard
        counts. Until the driver calls `discard`, the engine answers every question about those sums with NOT_READY."""

    def on_engine(self, event: str, fields: dict[str, object]) -> None:
        """Something worth a line."""


class Compute(Protocol):
    """One replica's microbatches, weights and versions. Awaitable methods run on the compute thread in priority order:
    the older step first; in it backward before forward, and weight-gradient passes after both.

    Raises:
        BadMessage: what a peer sent is wrong (BAD_SHAPE, NON_FINITE, MALFORMED). Nothing has changed then.
        Refused: OVERFLOWED, for a result that is not finite although everything sent was. NOT_READY, if a rank died and
            the work with it: the caller may ask again, here or elsewhere. Two methods never raise that: `accumulate`
            returns False, and a rank's death does not interrupt `apply`.
        DeviceFull: a device has no memory for it.
    """

    def subscribe(self, audience: Audience) -> None:
        """Say whom to tell what happens; once, before anything else is asked, in the event loop."""

    async def ready(self) -> None:
        """Return once it can compute, for the first time."""
        return  # not all have to start anything

    def snapshot_bytes(self, stage: int) -> int:
        """Bytes of a snapshot of that stage of the run, this one or another, at any version: no honest one has more."""

    @property
    def delay(self) -> Delay:
        """On which version's weights each step is computed, and so how many steps beyond `version` are open."""

    def discards(self, step: int) -> int:
        """The discard counter of an open step's accumulator: it only grows, from step to step too."""

    def discard(self, step: int | None = None) -> None:
        """Empty the accumulator of one open step (None: of all) and increase its discard counter. Running weight passes
        of that step add nothing.

        """

    def carries(self, bytes_per_s: int) -> None:
        """What this peer's line carries, as the last rounds have measured it."""
        return  # not every implementation has codecs to choose from

    def lengthen(self, notices: tuple[Notice, ...]) -> None:
        """The run's schedule, from the step that is applied next, is the manifest's with these notices in force."""
        return  # not every implementation has a schedule

    async def forward(self, step: int, index: int, payload: Sequence[Packed], *, train: bool) -> SavedActivations:
        """Run the stage as the open step `step` does. payload: (tokens,) for stage 0, else (tokens, hidden).

        Not train (eval) keeps nothing for backward: the weights of version v are those of step v + delay.
        """

    async def backward(self, stash: SavedActivations, gradient: Sequence[Packed]) -> tuple[Packed, ...]:
        """Input gradient only; queue the weight pass in `stash`. () for stage 0. Last stage: gradient is ()."""

    async def accumulate(self, stash: SavedActivations) -> bool:
        """The weight pass: add this microbatch's gradient once to the sum of its step. False if the discard count is no
        longer `stash.discards` (rule 5), or if the step is applied.

        Raises Overflow; NON_FINITE as BadMessage when the gradient is not finite (nothing is added then).
        """

    async def apply(self, commits: Sequence[Commit]) -> OuterStep | None:
        """One optimizer step on the finished sum: average by num_tokens, clip once by the global norm (all stages'
        grad_sq_norm summed in stage order), update the newest weights by the run's optimizer at the schedule's rate;
        then empty the step's accumulator and count the version up. Stashes of step version + 1, open before, stay
        good. The finished sum can still be read until the next one. With `averaging.sync = "local"` the outer step
        comes first, if one is due, and the gradient is this replica's own (`sums.local_sum`).

        commits: of all P stages, in order.
        """

    async def recompute(
        self, step: int, works: Sequence[PastWork], seed: bytes = b""
    ) -> tuple[tuple[Recomputed, ...], bytes]:
        """What `forward` and `backward` gave for these microbatches of a step that is over, bit by bit in one numerics
        class, one job for each. Asked for at version v, they run after all of step v + 1, or earlier.

        seed: of the aggregate's vector. With it the microbatches are a whole contribution, and its digest
        (`pledge.whole_of`) is returned too; without it b"".

        An audited run keeps the weights of the last `KEPT_WEIGHTS` steps, until other weights are restored.

        Raises Refused(NOT_READY) if the weights of that step are not kept; for a contribution also Overflow, or
        NON_FINITE as BadMessage, where a correct replica would not have added one of them.
        """

    async def measure(self) -> tuple[int, bytes]:
        """(version, digest of the weights' bits), see `messages.Measure`. The weights do not change meanwhile."""

    async def prepare_snapshot(self) -> None:
        """One snapshot will be asked for soon: have its memory ready, so that it can be taken without delay."""
        return  # not every implementation's snapshot needs memory of its own

    async def snapshot(self) -> bytes | memoryview:
        """Weights (with delay = 1 also those one version earlier) and optimizer state at this version as safetensors
        bytes, canonical names, full layout.

        Taken before anything else is computed; costs compute one copy of the state, and no more."""

    async def restore(self, data: bytes | memoryview, *, version: int, becomes: int | None = None) -> None:
        """Take over a snapshot of `version`, as the weights of version `becomes` (default: the same).

        Raises BadMessage if names, shapes or dtypes do not fit; unchanged then.
        """

    async def reset_to_seed(self) -> None:
        """Back to the weights of version 0: those a new engine has. Raises UsageError, and nothing has changed: the
        checkpoint that the run began with cannot be read any more."""


class Summation(Protocol):
    """One replica's part in the rounds of its stage, always of the oldest open step. Awaitable methods run concurrently
    with the compute thread, one at a time.

    A round sums `phases`, vectors one after the other; mostly one, the flat gradient. Positions count through all of
    them. Raises as `Compute` does; Refused(OVERFLOWED) for a result of our own that is not finite.
    """

    @property
    def num_elements(self) -> int:
        """Length of the flat gradient, in canonical parameter order."""

    @property
    def phases(self) -> tuple[int, ...]:
        """Lengths of the vectors that the round of this version sums. They may differ from version to version."""
        return (self.num_elements,)

    @property
    def private_phases(self) -> int:
        """How many of the first `phases` each member sums with its partners only (`averaging.grid`). They are no part
        of the finished sum. 0 with `averaging.partners = "all"`."""
        return 0

    @property
    def draw(self) -> tuple[int, int]:
        """(size, turn): how partners are drawn for this version's private phases."""
        return 2, 0

    @property
    def reference(self) -> bytes:
        """Digest of what my vector among partners is a difference to in the round that is open; empty: of nothing."""
        return b""

    @property
    def block(self) -> int:
        """The block size, a power of two. Every piece of a round must start at a multiple of it: otherwise the bits of
        the sum would depend on where the pieces were cut."""
        return 1

    @property
    def element_bytes(self) -> float:
        """About as many bytes an element of a contribution travels in. All members cut a vector by it."""
        return 8.0

    async def open_round(self, round_id: RoundId) -> None:
        """Open round `round_id`: every later `contribution` and `reduce` belongs to it."""
        return  # not every implementation's vector may change in a round

    async def contribution(self, start: int, stop: int, reference: bytes = b"") -> Packed:
        """Positions [start, stop) of the accumulator under the averaging codec. Of the second phase: once it began.

        reference: of the member that asks, see above. Raises Refused(NOT_READY) if the accumulator was discarded or
        lost since the round began.
        """

    async def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int = 0) -> Reduced:
        """Reduce positions [start, stop) by the run's reducer and encode them: all contributions of a part in one call.

        hop: after the first one contributions are what others have reduced (`averaging.grid`). Order, content and the
        sum applied last fix the bits. Raises BadMessage, which names the peer, and Overflow.
        """

    async def open_sum(self) -> None:
        """Another sum comes into the sum buffer, piece by piece: from a round, or from a replica that has it. What the
        buffer held is gone. Accumulator untouched."""

    async def put(self, start: int, packed: Packed) -> None:
        """Decode a reduced piece, or one of `finished_sum`, into the sum buffer; its first element is at position
        `start`. Raises BadMessage."""

    async def seal(self) -> tuple[bytes, float]:
        """The sum is whole: (digest of the decoded sum, the same however it was cut; its squared L2 norm in fp64 in
        canonical parameter order). Raises BAD_SHAPE unless each element was put once."""

    async def prove(self, seed: bytes) -> int:
        """The product of my contribution with the vector that this seed draws (`sums.linear`), modulo `messages.PRIME`.
        Raises as `contribution` does."""
        return 0

    async def weigh(self, packed: Packed | None, start: int, stop: int, seed: bytes) -> int:
        """The product of one contribution to [start, stop), or with None of the sealed sum there. Raises BadMessage."""
        return 0

    @property
    def travel_bytes(self) -> float:
        """About as many bytes the finished sum of a usual step travels in."""
        return self.element_bytes * self.num_elements

    async def finished_sum(self, start: int, stop: int) -> Packed:
        """Positions [start, stop) of the sum buffer, losslessly, in as few bytes as that takes."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Both halves of what one replica computes with."""

    compute: Compute
    sums: Summation
