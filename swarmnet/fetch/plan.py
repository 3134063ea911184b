"""Fetch a content from the peers that hold it: what may be fetched, from whom, and which piece comes next. Pure.

A *content* is some bytes that are named by the SHA-256 of each of their pieces (`messages.Content`), so each piece can
be checked when it arrives, from any holder. `FetchPlan` distributes the pieces over the holders: each has a few pieces
in flight and is asked for the next one when one arrives, so a faster holder delivers more. At the end a piece that a
slow holder has had for too long is asked of another one as well. `Holders` remembers which holders to leave out.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import MAX_PIECES, Content

PIECE_BYTES = 2 << 20
"""Of an ordinary content. A larger one has larger pieces, so that it never has more than MAX_PIECES."""

LARGEST_PIECE_BYTES = 256 << 20

LEAVE_OUT_S = 60.0
"""How long a holder that sent something false, or was late, is left out."""

_DIGEST_BYTES = 32


def piece_size(num_bytes: int, smallest: int = PIECE_BYTES) -> int:
    """Bytes of every piece but the last: `smallest`, doubled until there are at most MAX_PIECES."""
    size = smallest
    while size * MAX_PIECES < num_bytes:
        size *= 2
    return size


def num_pieces(content: Content) -> int:
    """How many pieces a content has; an empty one has none."""
    return -(-content.num_bytes // content.piece_bytes)


def span(content: Content, piece: int) -> tuple[int, int]:
    """First byte of a piece, and the one after its last."""
    start = piece * content.piece_bytes
    return start, min(start + content.piece_bytes, content.num_bytes)


def digest_of(content: Content, piece: int) -> bytes:
    """The SHA-256 that a piece must have."""
    return content.digests[piece * _DIGEST_BYTES : (piece + 1) * _DIGEST_BYTES]


def address(content: Content) -> bytes:
    """The hash that names a content: equal bytes in equal pieces have equal addresses."""
    lengths = struct.pack("<qq", content.num_bytes, content.piece_bytes)
    return hashlib.sha256(lengths + content.digests).digest()


def check_content(content: Content, *, max_bytes: int, holder: PeerId) -> None:
    """Refuse a content before any memory is taken for it. Raises BadMessage, which names the holder."""
    if content.num_bytes > max_bytes:
        facts = {"num_bytes": content.num_bytes, "max_bytes": max_bytes, "peer": holder}
        raise BadMessage(RejectCode.TOO_LARGE, "more bytes than this can have", **facts)
    fits = 0 < content.piece_bytes <= LARGEST_PIECE_BYTES and num_pieces(content) <= MAX_PIECES
    if not fits or len(content.digests) != _DIGEST_BYTES * num_pieces(content):
        raise BadMessage(RejectCode.MALFORMED, "pieces that do not make up the content", peer=holder)


class Holders:
    """Which holders to ask, by what became of earlier questions.

    A holder that sent something false is asked for nothing for LEAVE_OUT_S. One that was late is left out only while
    there are others: a peer that cannot be called costs its patience once a minute, not once a step.
    """

    def __init__(self) -> None:
        self._false: dict[PeerId, float] = {}
        self._late: dict[PeerId, float] = {}

    def sent_false(self, holder: PeerId, *, now: float) -> None:
        """It handed over something that is not what it described, or cannot be true."""
        self._false[holder] = now + LEAVE_OUT_S

    def was_late(self, holder: PeerId, *, now: float) -> None:
        """It did not answer in time."""
        self._late[holder] = now + LEAVE_OUT_S

    def answered(self, holder: PeerId) -> None:
        """It answered: it is not late any more."""
        self._late.pop(holder, None)

    def to_ask(self, holders: Iterable[PeerId], *, now: float) -> list[PeerId]:
        """Those of these that are asked now, each once."""
        usable = [holder for holder in dict.fromkeys(holders) if self._false.get(holder, now) <= now]
        return [holder for holder in usable if self._late.get(holder, now) <= now] or usable


# ---------------------------------------------------------------- which piece comes next

WINDOW = 4
"""Pieces in flight per holder."""

_FADE = 0.3
"""Weight of the newest piece in a holder's usual time."""

_TOO_LONG = 2.0
"""A piece is asked for again after so many times what the idle holder usually takes."""

_UNMEASURED_S = 3.0
"""The same, of an idle holder that has delivered no piece: the busy one may be Byzantine, and promise for ever."""


@dataclass(slots=True)
class _Holder:
    asked_at: dict[int, float] = field(default_factory=dict)
    usual_s: float | None = None
    """From asking to arrival, as measured lately; None until its first piece."""


class FetchPlan:
    """Distributes the pieces 0 .. num_pieces - 1 that are not `done` over the holders.

    Invariant: a piece is done, or left, or asked of one holder or two.
    """

    def __init__(self, num_pieces: int, *, done: Iterable[int] = (), window: int = WINDOW) -> None:
        self.done = set(done)
        self._num_pieces, self._window = num_pieces, window
        self._left = deque(piece for piece in range(num_pieces) if piece not in self.done)
        self._holders: dict[PeerId, _Holder] = {}
        self.overtaken: set[PeerId] = set()
        """Holders that have delivered nothing yet while another one delivered what they were asked for."""

    @property
    def complete(self) -> bool:
        """Is every piece here?"""
        return len(self.done) == self._num_pieces

    @property
    def holders(self) -> frozenset[PeerId]:
        """Which holders are asked at present."""
        return frozenset(self._holders)

    def add(self, holder: PeerId) -> None:
        """It has the content."""
        self._holders.setdefault(holder, _Holder())

    def drop(self, holder: PeerId) -> None:
        """It broke, sent something false or lost the content: the others are asked for its pieces."""
        dropped = self._holders.pop(holder, _Holder())
        self._left.extendleft(piece for piece in sorted(dropped.asked_at, reverse=True) if not self._askers(piece))

    def arrived(self, holder: PeerId, piece: int, *, now: float) -> None:
        """A piece came from that holder, and was checked."""
        source = self._holders[holder]
        took = now - source.asked_at[piece]
        source.usual_s = took if source.usual_s is None else source.usual_s + _FADE * (took - source.usual_s)
        self.done.add(piece)
        for peer, asked in self._holders.items():
            if asked.asked_at.pop(piece, None) is not None and asked.usual_s is None:
                self.overtaken.add(peer)
        self.overtaken.discard(holder)

    def requests(self, *, now: float) -> list[tuple[PeerId, int]]:
        """The (holder, piece) that should be under way now; the driver starts what is missing, and cancels the rest.

        Ask after every change, and now and then: a piece that takes too long is asked of another holder as well.
        """
        while self._left and self._holders:
            # The least busy holder comes first. If that one is full, all are.
            _, holder = min((len(held.asked_at), holder) for holder, held in self._holders.items())
            if len(self._holders[holder].asked_at) >= self._window:
                break
            self._holders[holder].asked_at[self._left.popleft()] = now
        if not self._left:
            self._ask_again(now)
        return [(holder, piece) for holder, held in self._holders.items() for piece in held.asked_at]

    def _ask_again(self, now: float) -> None:
        """Give idle holders what others have had for too long: the last piece must not wait for the slowest."""
        for idle in self._holders.values():
            if idle.asked_at:
                continue
            long_s = _UNMEASURED_S if idle.usual_s is None else _TOO_LONG * idle.usual_s
            waiting = [(at, piece) for held in self._holders.values() for piece, at in held.asked_at.items()]
            since, piece = min((each for each in waiting if self._askers(each[1]) == 1), default=(now, -1))
            if now - since > long_s:
                idle.asked_at[piece] = now

    def _askers(self, piece: int) -> int:
        return sum(piece in held.asked_at for held in self._holders.values())
