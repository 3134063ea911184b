"""What this replica answers for: the microbatches that it counted in the last steps, and what went into them.

Each counted microbatch leaves a `WorkRecord`, digests of what went in and came out as it travelled, and the payload
itself for the verifiers that compute it again (docs/trust.md). Digests are made as payloads come and go
(`pipeline.transfers`). Records of the last `KEPT_STEPS` steps stay, so that roots and paths never change once they are
pledged; payloads are bounded in bytes, and those of the oldest step go first: that work cannot be shown any more.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import AuditData, AuditRequest, Packed, Sent, WorkRecord
from swarmnet.pledge import leaf, path_of, root_of
from swarmnet.stage.interfaces import Recomputed

KEPT_STEPS = 5
"""A step is looked into two versions later; its verifiers may take as long again."""

KEPT_CACHES = 4
"""Bytes of payloads that are kept, as a multiple of the output cache, which holds one step."""

LEAST_BYTES = 1 << 20
"""Of payloads, however small the output cache: a replica that shows no work is suspended."""

MOST_ASKS = 6
"""Times that a work is shown to one replica, and that a correct one asks: it has drawn it, it verifies it, and it
verifies it again after a report was withdrawn; each for the work itself and as part of its member's whole
contribution."""

_ACCUMULATORS = 3
"""Of a step with kept works. The leader may invalidate accumulators without end, and an aggregate holds one of the
last."""


def digest(payload: Sequence[Packed]) -> bytes:
    """BLAKE3 of tensors as they travel: of each the codec, shape and data, with their lengths before them."""
    whole = blake3()
    for packed in payload:
        name = packed.codec.encode()
        head = struct.pack(f">II{len(packed.shape)}qQ", len(name), len(packed.shape), *packed.shape, packed.num_bytes)
        whole.update(head + name)
        whole.update(packed.data)
    return whole.digest()


def opened(
    data: AuditData, check: Callable[[tuple[Packed, ...]], None]
) -> tuple[tuple[Packed, ...], tuple[Packed, ...]]:
    """(inputs, gradient) of a microbatch that a peer shows, to compute it again.

    check: refuses, with BadMessage, what is no input of that microbatch in this run (`pipeline.inputs`). Raises
    BadMessage(MALFORMED), too, if its record is not of this payload.
    """
    work = data.work
    # The last stage is sent no gradient; in the others it comes last.
    last = work.gradient == digest(())
    payload, gradient = (data.payload, ()) if last else (data.payload[:-1], data.payload[-1:])
    if len(payload) < 2 or digest(payload[:-1]) != work.input or digest(gradient) != work.gradient:
        raise BadMessage(RejectCode.MALFORMED, "not what the work was made of", index=work.index)
    check(payload)
    return payload[:-1], gradient


def off_by(shown: AuditData, again: Recomputed) -> float:
    """How far what a peer made is from what another class makes of the same: of output, answer and loss the largest
    distance, in lengths of the other. inf: it is not what was pledged, or of another shape."""
    work, last = shown.work, shown.work.output == digest(())
    made, answer = (shown.payload[:0], shown.payload) if last else (shown.payload[:2], shown.payload[2:])
    if digest(made) != work.output or digest(answer) != work.answer:
        return math.inf
    pairs = [*zip(made[1:], again.output[1:], strict=False), *zip(answer, again.answer, strict=False)]
    if (len(made), len(answer)) != (len(again.output), len(again.answer)):
        return math.inf
    apart = [abs(work.loss_sum - again.loss_sum) / max(abs(again.loss_sum), 1e-9)] if last else []
    return max([*apart, *(_distance(one, other) for one, other in pairs)], default=0.0)


def _distance(one: Packed, other: Packed) -> float:
    from swarmnet.wire import codecs

    if one.shape != other.shape:
        return math.inf
    mine, theirs = codecs.decode(one).double(), codecs.decode(other).double()
    distance = float((mine - theirs).norm() / theirs.norm().clamp(min=1e-30))
    return distance if math.isfinite(distance) else math.inf


@dataclass(slots=True)
class _Work:
    """payload: what went in, the proof last, and the gradient; None: dropped. made: output and answer, where they are
    kept. sents: who stands for having sent it."""

    record: WorkRecord
    payload: tuple[Packed, ...] | None
    made: tuple[Packed, ...] | None
    num_bytes: int
    sents: tuple[Sent, ...]


class WorkBook:
    """Works of this replica in one stage, by step and index. cap_bytes: of payloads; num_bytes: that are held now.

    keeps_made: keep output and answer too, and twice as many bytes, because kernels may make other bits of the same
    input.
    """

    def __init__(self, cap_bytes: int, *, keeps_made: bool = False) -> None:
        self.cap_bytes, self.num_bytes, self._keeps_made = cap_bytes * (1 + keeps_made), 0, keeps_made
        # By step, those of each of its last accumulators; the last is the one that is filled now.
        # Invariant: of a step whose contribution is known (`contributed`), of that accumulator alone.
        self._steps: dict[int, list[dict[int, _Work]]] = {}

    def begin(self, step: int) -> None:
        """The step is opened. If it was open before, the run went back, and is not asked about that any more."""
        for other in [other for other in self._steps if other >= step or other <= step - KEPT_STEPS]:
            self._drop(self._steps.pop(other))
        self._steps[step] = [{}]

    def discard(self, step: int) -> None:
        """The accumulator of that step is empty again. An aggregate may hold what it held: a rank can be lost once its
        peer has sent its shards, and the peer still answers for them."""
        accumulators = self._steps.setdefault(step, [])
        accumulators.append({})
        self._drop(accumulators[:-_ACCUMULATORS])
        del accumulators[:-_ACCUMULATORS]

    def contributed(self, step: int, root: bytes | None) -> bool:
        """The aggregate of that step holds the works under this root, which this replica has pledged: those of other
        accumulators go. Are any of them here? None: another process of this identity has pledged."""
        accumulators = self._steps.get(step, [])
        # By the root: the same indexes may have been accumulated again since, and kernels may make other bits of them.
        held = next((works for works in accumulators if root_of(_leaves(works)) == root), None)
        if held is not None:
            self._drop([works for works in accumulators if works is not held])
            self._steps[step] = [held]
        return bool(held)

    def _drop(self, accumulators: Iterable[dict[int, _Work]]) -> None:
        self.num_bytes -= sum(work.num_bytes for works in accumulators for work in works.values())

    def _filled(self, step: int) -> dict[int, _Work]:
        """Those of the accumulator that is filled now, or of the one that contributed."""
        return self._steps.get(step, [{}])[-1]

    def _of(self, step: int, index: int) -> dict[int, _Work]:
        """Those of the newest accumulator that holds `index`."""
        return next((works for works in reversed(self._steps.get(step, [])) if index in works), {})

    def add(
        self,
        step: int,
        record: WorkRecord,
        payload: tuple[Packed, ...],
        sents: tuple[Sent, ...] = (),
        *,
        made: tuple[Packed, ...] = (),
    ) -> None:
        """A microbatch is counted. payload: its input with the proof of its tokens, then the gradient of its output.
        sents: what neighbours have signed of those. made: its output, then its answer."""
        kept = made if self._keeps_made else None
        size = sum(packed.num_bytes for packed in (*payload, *(kept or ())))
        works = self._steps.setdefault(step, [{}])[-1]
        if (before := works.pop(record.index, None)) is not None:
            self.num_bytes -= before.num_bytes
        works[record.index] = _Work(record, payload, kept, size, sents)
        self.num_bytes += size
        for oldest in sorted(self._steps):
            for work in itertools.chain.from_iterable(works.values() for works in self._steps[oldest]):
                if self.num_bytes <= self.cap_bytes:
                    return
                self.num_bytes -= work.num_bytes
                work.payload = work.made = None
                work.num_bytes = 0

    def records(self, step: int) -> Mapping[int, WorkRecord]:
        """What was counted in that step, by index."""
        return {index: work.record for index, work in self._filled(step).items()}

    def sents(self, step: int) -> list[Sent]:
        """What neighbours have signed of what went into that step."""
        return [sent for work in self._filled(step).values() for sent in work.sents]

    def root(self, step: int) -> bytes:
        """The root over what was counted in that step."""
        return root_of(_leaves(self._filled(step)))

    def shown(self, step: int, index: int) -> AuditData | None:
        """What went into a microbatch, its record, and the way to the root; None: not counted here, or dropped."""
        works = self._of(step, index)
        if (work := works.get(index)) is None or work.payload is None:
            return None
        return AuditData(work.record, path_of(_leaves(works), index), work.payload, work.sents)

    def made(self, step: int, index: int) -> tuple[Packed, ...] | None:
        """Output and answer of a microbatch; None: they are not kept, and can be made again of what went into it."""
        work = self._of(step, index).get(index)
        return None if work is None else work.made

    def bare(self, step: int, index: int) -> AuditData | None:
        """The same without what went into it, which may be dropped."""
        works = self._of(step, index)
        return AuditData(works[index].record, path_of(_leaves(works), index)) if works else None


class ShownWorks:
    """What others have shown to this replica, so that verifiers may have it from here; the oldest goes first.

    Of the steps before the open one, as long as a replica can compute them again."""

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes, self.num_bytes = cap_bytes, 0
        self._shown: OrderedDict[AuditRequest, AuditData] = OrderedDict()
        self._asks: Counter[tuple[PeerId, PeerId, int, int]] = Counter()  # by who asks, and of whom, step and index

    def begin(self, step: int) -> None:
        """The step is opened: drop what no replica can compute again any more, and what is of a run that went back."""
        for request in [each for each in self._shown if not step - KEPT_STEPS <= each.step < step]:
            self._drop(request)
        self._asks = Counter({key: count for key, count in self._asks.items() if step - KEPT_STEPS <= key[2] < step})

    def keep(self, request: AuditRequest, data: AuditData) -> None:
        """`request.peer` has shown this."""
        self._drop(request)
        self._shown[request] = data
        self.num_bytes += _size(data)
        while self.num_bytes > self._cap_bytes:
            self._drop(next(iter(self._shown)))

    def get(self, request: AuditRequest) -> AuditData | None:
        """What it has shown, if that is still here."""
        return self._shown.get(request)

    def asked(self, asker: PeerId, request: AuditRequest) -> None:
        """A work, of this replica or of another one, is shown to that replica. Raises Refused(TOO_OFTEN)."""
        key = asker, request.peer, request.step, request.index
        if self._asks[key] >= MOST_ASKS:
            raise Refused(RejectCode.TOO_OFTEN, f"it was shown to you {MOST_ASKS} times")
        self._asks[key] += 1

    def _drop(self, request: AuditRequest) -> None:
        if request in self._shown:
            self.num_bytes -= _size(self._shown.pop(request))


def _leaves(works: Mapping[int, _Work]) -> dict[int, bytes]:
    return {index: leaf(work.record) for index, work in works.items()}


def _size(data: AuditData) -> int:
    return sum(packed.num_bytes for packed in data.payload)


def show(works: WorkBook, shown: ShownWorks, asker: PeerId, request: AuditRequest, *, me: PeerId) -> AuditData:
    """The answer to another replica: about a microbatch that this replica counted, or that its peer has shown here.

    Raises Refused: NOT_FOUND, TOO_OFTEN."""
    step, index, bare = request.step, request.index, request.bare and request.peer == me
    found = (works.bare if bare else works.shown)(step, index) if request.peer == me else shown.get(request)
    if found is None:
        raise Refused(RejectCode.NOT_FOUND, "not kept here", step=step, index=index)
    if not bare:
        shown.asked(asker, request)
    return found
