"""Who is asked for which piece of something that many have: copies of a state, and finished sums. Pure.

Every source has a few pieces in flight and is given the next one when one arrives, so whoever is faster delivers more.
What a slow one has had for too long at the end is asked of others as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarmnet.ids import PeerId

WINDOW = 4
"""Pieces in flight per source."""

_FADE = 0.3
"""Weight of the newest piece in a source's usual time."""

_TOO_LONG = 2.0
"""A piece is asked for again after so many times what the idle source usually takes."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this source for this piece."""

    peer: PeerId
    piece: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody needs the answer to this any more: cancel."""

    peer: PeerId
    piece: int


Action = Ask | Drop


@dataclass(slots=True)
class _Source:
    asked_at: dict[int, float] = field(default_factory=dict)
    usual_s: float | None = None
    """From asking to arrival, as measured lately; None until its first piece."""


class PieceSchedule:
    """Distributes the pieces 0 .. num_pieces - 1 that are not `done` over whoever has them. Pure.

    It knows no bytes and no digests: a piece arrives when its bytes have been verified.
    """

    def __init__(self, num_pieces: int, *, done: Iterable[int] = (), window: int = WINDOW) -> None:
        self.done = set(done)
        self._num_pieces, self._window = num_pieces, window
        self._left = deque(piece for piece in range(num_pieces) if piece not in self.done)
        self._sources: dict[PeerId, _Source] = {}

    @property
    def complete(self) -> bool:
        """Is every piece here?"""
        return len(self.done) == self._num_pieces

    @property
    def sources(self) -> frozenset[PeerId]:
        """Who is asked at present."""
        return frozenset(self._sources)

    def add(self, peer: PeerId, *, now: float) -> list[Action]:
        """`peer` has the copy."""
        # It was found twice.
        if peer in self._sources:
            return []
        self._sources[peer] = _Source()
        return self.fill(now)

    def remove(self, peer: PeerId, *, now: float) -> list[Action]:
        """`peer` broke, lied or no longer has the copy: others take over what it was asked for."""
        source = self._sources.pop(peer, None)
        if source is None:
            return []
        lost = [piece for piece in sorted(source.asked_at) if piece not in self.done and not self._askers(piece)]
        self._left.extendleft(reversed(lost))
        return [*(Drop(peer, piece) for piece in sorted(source.asked_at)), *self.fill(now)]

    def arrived(self, peer: PeerId, piece: int, *, now: float) -> list[Action]:
        """A verified piece. Late ones of a source that was given up count too."""
        source = self._sources.get(peer)
        asked_at = source.asked_at.pop(piece, None) if source is not None else None
        if source is not None and asked_at is not None:
            took = now - asked_at
            source.usual_s = took if source.usual_s is None else source.usual_s + _FADE * (took - source.usual_s)
        # Two sources were asked for it, and the other one was faster.
        if piece in self.done:
            return self.fill(now)
        self.done.add(piece)
        if piece in self._left:
            self._left.remove(piece)
        actions: list[Action] = []
        # Whoever else was asked for it need not send it any more.
        for other in self._askers(piece):
            del self._sources[other].asked_at[piece]
            actions.append(Drop(other, piece))
        return [*actions, *self.fill(now)]

    def _askers(self, piece: int) -> list[PeerId]:
        return [peer for peer, source in self._sources.items() if piece in source.asked_at]

    def fill(self, now: float) -> list[Action]:
        """Use every source to its window, the least busy first. Ask now and then: what is slow is asked of others."""
        actions: list[Action] = []
        while self._sources:
            peer = min(self._sources, key=lambda p: (len(self._sources[p].asked_at), p))
            source = self._sources[peer]
            # The least busy source is full, so all are.
            if not self._left or len(source.asked_at) >= self._window:
                break
            piece = self._left.popleft()
            source.asked_at[piece] = now
            actions.append(Ask(peer, piece))
        if not self._left:
            actions += self._take_over(now)
        return actions

    def _take_over(self, now: float) -> list[Action]:
        """Give idle sources what others have had for too long; no piece is with more than two."""
        # The last piece must not wait for the slowest source.
        actions: list[Action] = []
        for peer, source in self._sources.items():
            # It is busy, or nobody knows how fast it is.
            if source.asked_at or source.usual_s is None:
                continue
            waiting = [
                (other.asked_at[piece], piece)
                for other in self._sources.values()
                for piece in other.asked_at
                if len(self._askers(piece)) == 1
            ]
            since, piece = min(waiting, default=(now, -1))
            if now - since > _TOO_LONG * source.usual_s:
                source.asked_at[piece] = now
                actions.append(Ask(peer, piece))
        return actions
