"""The ranks of one stage, kept going: ordered with deadlines, started again when one is lost, given up in the end.

What ranks hold is of two kinds. Sums and microbatches in flight are gone with them, and an order that needs them is
refused. Weights and moments are not: after each start the ranks read them again (`load`), so an order that needs
nothing else is repeated until it is done (`insist`). Knows no tensors; what orders mean is `ranks.program`'s.

A deadline is there for what never ends, not for what is slow: first orders build kernels, fill caches, meet a busy
machine.

Ranks are given up that do nothing but get lost. Finished work shows that they are good for something, and so do minutes
without a loss. Neither shows that for an order that kills them whenever it comes: only that order, done, does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnet.errors import DeviceFull, MeshFailed, RankLost, Refused, RejectCode
from swarmnet.ranks.group import RankGroup
from swarmnet.stage.backend import OnEvent


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """How long ranks may take for an order, how often they are started again, and after which pauses.

    order_s: for an order.
    restarts: how often ranks are started again without anything finished in between, or for one kind of order without
    one done in between; pauses before a restart grow from nothing over pause_s, doubled each time. forget_s: of being
    up, after which losses are forgotten that no order is to blame for.
    """

    order_s: float = 300.0
    restarts: int = 5
    pause_s: float = 0.25
    forget_s: float = 300.0

    def pause(self, losses: int) -> float:
        """Seconds to wait before ranks are started that were lost so often since something was finished."""
        return 0.0 if losses < 2 else self.pause_s * 2.0 ** (losses - 2)


@dataclass(slots=True)
class Losses:
    """How often ranks were lost, in all and by the kind of order that they were at."""

    backoff: RestartBackoff
    _since_work: int = 0
    _in_order: dict[str, int] = field(default_factory=dict)

    @property
    def times(self) -> int:
        """How often in a row, as whatever counts most losses sees it."""
        return max(self._since_work, *self._in_order.values(), 0)

    @property
    def verdict(self) -> str | None:
        """Why ranks are given up, in words; None: they are not."""
        most = self.backoff.restarts
        if self._since_work > most:
            return f"were started {self._since_work} times and finished nothing"
        for order, times in self._in_order.items():
            if times > most:
                return f"were lost {times} times in the order {order!r}, which they never finished in between"
        return None

    def lost(self, order: str | None, *, up_s: float) -> None:
        """They were, at that order, after so long up; None: at no order, or as they started."""
        self._since_work = 1 if up_s >= self.backoff.forget_s else self._since_work + 1
        # An order that kills them whenever it comes is not excused by others that they finish.
        if order is not None:
            self._in_order[order] = self._in_order.get(order, 0) + 1

    def did(self, order: str) -> None:
        """They have done one of these, all of them."""
        self._in_order.pop(order, None)

    def finished(self) -> None:
        """They have finished work: a microbatch, an evaluation, a step."""
        self._since_work = 0


class Ranks:
    """Threads take turns by `lock`, which they may hold around several calls.

    on_lost: hears that what ranks held is gone. load: the orders that bring ranks to the state as it is now. label: of
    the mesh, for people. life: how often what ranks held was lost. holds: the step of each microbatch
    that they have something of, by the key that it was ordered under.
    """

    def __init__(
        self,
        group: RankGroup,
        on_lost: Callable[[], None],
        on_event: OnEvent,
        *,
        label: str,
        load: Callable[[], Sequence[tuple[str, Mapping[str, Any]]]],
        backoff: RestartBackoff,
    ) -> None:
        self.lock = threading.RLock()
        self.life = 0
        self.holds: dict[int, int] = {}
        self._group, self._lost, self._event, self._label, self._load = group, on_lost, on_event, label, load
        self._backoff = backoff
        self._up = False
        self._since = 0.0
        self._losses = Losses(backoff)
        self._why = ""
        self._forgotten: deque[int] = deque()
        self._closing = threading.Event()

    def forget(self, key: int) -> None:
        """Have ranks drop what they hold under `key`, with their next order. Any thread, at any time."""
        self._forgotten.append(key)

    def forget_step(self, version: int) -> None:
        """Have them drop what is of steps up to `version`: they are applied."""
        with self.lock:
            # The engine lets go of them too, but a task that lingers would keep their memory on the ranks.
            for key, step in self.holds.items():
                if step <= version:
                    self.forget(key)

    def start(self) -> None:
        """Have the ranks up: at once if they are. Notices the death of idle ones.

        Raises MeshFailed: given up; DeviceFull: for want of memory.
        """
        with self.lock:
            # Idle ranks die unnoticed until somebody looks.
            if self._up:
                try:
                    self._group.check()
                except RankLost as lost:
                    self._on_loss(lost, None)
            while not self._up:
                self._begin()

    def start_or_refuse(self) -> None:
        """As `start`. Raises Refused(NOT_READY): given up."""
        try:
            self.start()
        except MeshFailed as failed:
            raise Refused(RejectCode.NOT_READY, failed.message) from failed

    def order(self, name: str, /, *, life: int | None = None, **fields: Any) -> list[Mapping[str, Any]]:
        """All ranks' answers, by rank. life: of the ranks that can do it; None: whoever is up.

        Raises Refused(NOT_READY) if these are lost, before or meanwhile, DeviceFull if for want of memory, and what all
        ranks raise.
        """
        with self.lock:
            self.start_or_refuse()
            if life not in (None, self.life):  # these ranks never had what the order is about
                raise Refused(RejectCode.NOT_READY, "the ranks that held what this needs were lost", order=name)
            try:
                return self._do(name, fields)
            except RankLost as lost:
                self._on_loss(lost, name)
                if _full(lost):
                    raise DeviceFull(lost.reason) from None
                raise Refused(RejectCode.NOT_READY, "a rank of this peer was lost, and is started again") from lost

    def insist(self, name: str, /, **fields: Any) -> None:
        """Have it done, by other ranks if these are lost. Raises Refused(NOT_READY) if they are given up."""
        with self.lock:
            while True:
                self.start_or_refuse()
                try:
                    self._do(name, fields)
                    return
                except RankLost as lost:
                    self._on_loss(lost, name)

    def reload(self) -> None:
        """The state of now is another. Ranks that are not up read it when they start."""
        with self.lock:
            # They read the state of now when they start.
            if not self._up:
                return
            try:
                self._read()
                # Ranks drop all of it when they read another state.
                self.life += 1
                self.holds.clear()
            except RankLost as lost:
                self._on_loss(lost, "load")

    def finished(self) -> None:
        """A microbatch was counted or evaluated, or a step was taken: these ranks do work."""
        self._losses.finished()

    def close(self) -> None:
        """End them, whatever they are at; no process and no memory is left. May be called again, from any thread."""
        self._closing.set()
        self._group.close()

    def _begin(self) -> None:
        # Starting them once more would end as it always has.
        if (verdict := self._losses.verdict) is not None:
            given_up = DeviceFull if _OUT_OF_MEMORY in self._why else MeshFailed
            raise given_up(f"ranks ({self._label}) {verdict}; the last time {self._why}")
        if self._closing.wait(self._backoff.pause(self._losses.times)):
            raise MeshFailed("the ranks have been stopped for good")
        began = time.monotonic()
        try:
            self._group.start()
            self._read()
        except RankLost as lost:
            self._on_loss(lost, None)
            # Nothing is on the device yet but what the stage is: another start would find as little room.
            if _full(lost):
                raise DeviceFull(f"ranks ({self._label}) cannot start: {lost.reason}") from None
            return
        self._up, self._since = True, time.monotonic()
        self._event(
            "mesh_started",
            {
                "mesh": self._label,
                "epoch": self._group.epoch,
                "pids": list(self._group.pids),
                "seconds": round(self._since - began, 3),
            },
        )

    def _read(self) -> None:
        for name, fields in self._load():
            self._do(name, fields)

    def _do(self, name: str, fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        # of keys that ranks no longer hold, such as those of ranks that were lost, nothing is said
        keys = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        forgotten = [key for key in keys if self.holds.pop(key, None) is not None]
        answers = self._group.order(name, deadline_s=self._backoff.order_s, forgotten=forgotten, **fields)
        self._losses.did(name)
        return answers

    def _on_loss(self, lost: RankLost, order: str | None) -> None:
        self._losses.lost(order, up_s=time.monotonic() - self._since if self._up else 0.0)
        if self._up:  # ranks that were lost as they started held nothing yet
            self._up = False
            self.life += 1
            self.holds.clear()
            self._lost()
        self._why = lost.reason
        if not self._closing.is_set():  # ranks that we end ourselves are no event
            seconds = round(time.monotonic() - self._since, 3) if self._since else 0.0
            self._event(
                "rank_lost", {"rank": lost.rank, "reason": lost.reason, "epoch": self._group.epoch, "seconds": seconds}
            )


_OUT_OF_MEMORY = "OutOfMemoryError"
"""In the last words of a rank whose device had no memory: torch's name of the error."""


def _full(lost: RankLost) -> bool:
    return _OUT_OF_MEMORY in lost.reason
