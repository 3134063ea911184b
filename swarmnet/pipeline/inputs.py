"""What comes into a stage: who may bring a microbatch, and what its tensors must look like, both ways.

Checked before anything is computed, and as early as can be:

| when | what | refused as |
|---|---|---|
| the call arrives | may this caller feed the stage (rule 1)? | `NOT_A_FEEDER`, or `Busy` |
| before the payload is read | declared codecs and shapes | `BAD_SHAPE` |
| it is here | tokens are words, proven to be those of (step, index); none is too large | `MALFORMED`, `NON_FINITE` |

The sender of an invalid tensor is to blame, so the check is made where the sender is still known: at the upload, at the
answer. A tensor that passes is trusted: if a value computed from it is not finite, no peer is to blame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarmnet.bounds import is_loss
from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Fetch, Fetched, Gradient, Packed, Process
from swarmnet.transport import Layout, TensorLayout, layout_of
from swarmnet.wire.codecs import check_bounded, check_range

# ---------------------------------------------------------------- who may feed
#
# Stage k > 0 is fed by members of stage k - 1, stage 0 by trainers. Tokens carry a proof (`pipeline.windows`), hidden
# states cannot. The replica finds out the facts about a caller.


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """Why a caller may not feed, in words for a person. soon: one more heartbeat may change that, so it is to wait."""

    reason: str
    soon: bool = False


def may_feed(request: Process, *, feeds: bool, replica: bool, known: bool, admitted: bool) -> TurnedAway | None:
    """None if the caller may bring this microbatch to `request.stage`, by what the replica knows of it right now.

    Args:
        feeds: it is a live replica of the stage before, or another stage of this very peer.
        replica: it is a live replica of the same stage.
        known: it is known as a replica of the stage before, and is silent, or without its state.
        admitted: the run takes it as a trainer.
    """
    if request.stage == 0:
        if request.purpose == "eval" or admitted or replica:
            return None  # every peer may ask for an evaluation: it adds to no gradient
        return TurnedAway("the run has not admitted you as a trainer: ask its owner for an invitation")
    if feeds or (replica and request.repair):
        return None
    before = f"a replica of stage {request.stage - 1}"
    if known:
        return TurnedAway(f"you are known as {before}, but silent or without its state for now", soon=True)
    return TurnedAway(f"you are not known here as {before}, and only those feed stage {request.stage}")


# ---------------------------------------------------------------- what it must look like


class Windows(Protocol):
    """Which tokens are those of a training microbatch: `pipeline.windows`, or in the simulator a stand-in."""

    @property
    def layout(self) -> TensorLayout:
        """The layout of the proof that travels with the tokens."""
        ...

    def check(self, step: int, index: int, tokens: Packed, proof: Packed) -> None:
        """Raise BadMessage(MALFORMED) unless `proof` shows that `tokens` are those of (step, index)."""
        ...


def _check_layout(found: Layout, *allowed: Layout) -> None:
    if found not in allowed:
        raise BadMessage(RejectCode.BAD_SHAPE, f"expected {allowed[0]}, got {found}"[:500])


def _ways(expected: Layout, slow: str) -> tuple[Layout, ...]:
    """`expected`, and where the run has a codec for slow lines the same with its last tensor in that."""
    if not slow:
        return (expected,)
    *before, (_, shape) = expected
    return expected, (*before, (slow, shape))


def _evaluates(request: Process | Fetch) -> bool:
    return isinstance(request, Process) and request.purpose == "eval"


@dataclass(frozen=True, slots=True)
class InputCheck:
    """Checks the input of one stage: `expected` is (tokens,) for stage 0, (tokens, hidden) otherwise. In training the
    proof of the tokens comes last. slow: the run's codec for slow lines, which hidden may come in; "": none."""

    expected: Layout
    vocab_size: int
    windows: Windows
    slow: str = ""

    def declared(self, request: Process | Fetch, layout: Layout) -> None:
        """Raise BadMessage (BAD_SHAPE) unless codecs and shapes are those of the run."""
        proof = () if _evaluates(request) else (self.windows.layout,)
        _check_layout(layout, *((*way, *proof) for way in _ways(self.expected, self.slow)))

    def __call__(self, request: Process | Fetch, payload: tuple[Packed, ...]) -> None:
        """Raise BadMessage unless codecs and shapes are those of the run (BAD_SHAPE), tokens are words, in training
        those of this very microbatch (MALFORMED), and everything is finite (NON_FINITE)."""
        self.declared(request, layout_of(payload))
        for packed in payload:
            check_bounded(packed)
        check_range(payload[0], below=self.vocab_size)
        if not _evaluates(request):  # an evaluation may be of any text, and nothing of it counts
            self.windows.check(request.step, request.index, payload[0], payload[-1])


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Checks what one stage answers: (gradient,) of its input, () from stage 0 and to an evaluation. slow: the run's
    codec for slow lines, which the gradient may come in; "": none. further: stages after it, of each of which an
    evaluation names a replica."""

    expected: Layout
    num_tokens: int
    slow: str = ""
    further: int = 0

    def __call__(self, request: Process, answer: Gradient) -> None:
        """Raise BadMessage unless `answer` can be an answer to `request`: BAD_SHAPE, MALFORMED, NON_FINITE."""
        ways = _ways(self.expected, self.slow) if request.purpose == "train" else ((),)
        _check_layout(layout_of(answer.payload), *ways)
        if len(answer.route) != (self.further if _evaluates(request) else 0):
            raise BadMessage(RejectCode.MALFORMED, "a route through other stages than those ahead")
        self._check(answer)

    def remembered(self, answer: Fetched) -> None:
        """The same for a memoised answer to training."""
        _check_layout(layout_of(answer.payload), *_ways(self.expected, self.slow))
        self._check(answer)

    def _check(self, answer: Gradient | Fetched) -> None:
        if answer.num_tokens != self.num_tokens:
            raise BadMessage(RejectCode.MALFORMED, "not the microbatch's tokens", num_tokens=answer.num_tokens)
        if not is_loss(answer.loss_sum, answer.num_tokens):
            raise BadMessage(RejectCode.MALFORMED, "a loss that no microbatch has", loss_sum=answer.loss_sum)
        for packed in answer.payload:
            check_bounded(packed)
