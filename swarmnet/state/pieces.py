"""Which piece of a copy to ask of whom. Pure: events and `now` in, actions out.

Every source has a few pieces in flight and is given the next one when one arrives, so whoever is faster delivers more.
A source that breaks or lies loses its pieces to the others. When nothing is left to ask for, whoever is idle is asked
for what a slower source has had for too long: the last piece never waits for the slowest. It knows no bytes and no
digests: a piece arrives when its bytes have been verified.
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
    """usual_s: from asking to arrival, as measured lately; None until its first piece."""

    asked_at: dict[int, float] = field(default_factory=dict)
    usual_s: float | None = None


class PieceSchedule:
    """Distributes the pieces 0 .. num_pieces - 1 that are not `done` over whoever has them."""

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
        if peer in self._sources:
            return []
        self._sources[peer] = _Source()
        return self._fill(now)

    def remove(self, peer: PeerId, *, now: float) -> list[Action]:
        """`peer` broke, lied or no longer has the copy: others take over what it was asked for."""
        source = self._sources.pop(peer, None)
        if source is None:
            return []
        lost = [piece for piece in sorted(source.asked_at) if piece not in self.done and not self._askers(piece)]
        self._left.extendleft(reversed(lost))
        return [*(Drop(peer, piece) for piece in sorted(source.asked_at)), *self._fill(now)]

    def arrived(self, peer: PeerId, piece: int, *, now: float) -> list[Action]:
        """A verified piece. Late ones of a source that was given up count too."""
        source = self._sources.get(peer)
        asked_at = source.asked_at.pop(piece, None) if source is not None else None
        if source is not None and asked_at is not None:
            took = now - asked_at
            source.usual_s = took if source.usual_s is None else source.usual_s + _FADE * (took - source.usual_s)
        if piece in self.done:
            return self._fill(now)
        self.done.add(piece)
        if piece in self._left:
            self._left.remove(piece)
        actions: list[Action] = []
        for other in self._askers(piece):
            del self._sources[other].asked_at[piece]
            actions.append(Drop(other, piece))
        return [*actions, *self._fill(now)]

    def tick(self, *, now: float) -> list[Action]:
        """Time has passed: what is slow may be asked of others."""
        return self._fill(now)

    def _askers(self, piece: int) -> list[PeerId]:
        return [peer for peer, source in self._sources.items() if piece in source.asked_at]

    def _fill(self, now: float) -> list[Action]:
        """Use every source to its window, the least busy first."""
        actions: list[Action] = []
        while self._sources:
            peer = min(self._sources, key=lambda p: (len(self._sources[p].asked_at), p))
            source = self._sources[peer]
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
        actions: list[Action] = []
        for peer, source in self._sources.items():
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
