"""The ranks of one stage, kept going: ordered with deadlines, started again when one is lost, given up in the end.

What ranks hold is of two kinds. Sums and microbatches in flight are gone with them, and an order that needs them is
refused. Weights and moments are not: after each start the ranks read them again (`load`), so an order that needs
nothing else is repeated until it is done (`insist`). Knows no tensors; what orders mean is `stage.rank_program`'s.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from swarmnet.errors import MeshFailed, RankLost, Refused, RejectCode
from swarmnet.mesh.group import RankGroup
from swarmnet.stage.body import Watcher
from swarmnet.stage.patience import Losses, OrderTimes, RestartBackoff


class Ranks:
    """Threads take turns by `lock`, which they may hold around several calls.

    load: the fields of the order that brings ranks to the state as it is now. label: of the mesh, for people. life: how
    often what ranks held was lost. holds: the step of each microbatch that they have something of, by the key that it
    was ordered under.
    """

    def __init__(
        self,
        group: RankGroup,
        watcher: Watcher,
        *,
        label: str,
        load: Callable[[], Mapping[str, Any]],
        backoff: RestartBackoff,
    ) -> None:
        self.lock = threading.RLock()
        self.life = 0
        self.holds: dict[int, int] = {}
        self._group, self._watcher, self._label, self._load = group, watcher, label, load
        self._backoff, self._pace = backoff, OrderTimes(backoff)
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
            for key, step in self.holds.items():
                if step <= version:
                    self.forget(key)

    def start(self) -> None:
        """Have the ranks up: at once if they are. Notices the death of idle ones. Raises MeshFailed: given up."""
        with self.lock:
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

        Raises Refused(NOT_READY) if these are lost, before or meanwhile, and what all ranks raise.
        """
        with self.lock:
            self.start_or_refuse()
            if life not in (None, self.life):
                raise Refused(RejectCode.NOT_READY, "the ranks that held what this needs were lost", order=name)
            try:
                return self._do(name, fields)
            except RankLost as lost:
                self._on_loss(lost, name)
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
            if not self._up:
                return
            try:
                self._do("load", self._load())
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
        if (verdict := self._losses.verdict) is not None:
            raise MeshFailed(f"ranks ({self._label}) {verdict}; the last time {self._why}")
        if self._closing.wait(self._backoff.pause(self._losses.times)):
            raise MeshFailed("the ranks have been stopped for good")
        began = time.monotonic()
        try:
            self._group.start()
            self._pace.started()
            self._do("load", self._load())
        except RankLost as lost:
            self._on_loss(lost, None)
            return
        self._up, self._since = True, time.monotonic()
        self._watcher.event(
            "mesh_started",
            {
                "mesh": self._label,
                "epoch": self._group.epoch,
                "pids": list(self._group.pids),
                "seconds": round(self._since - began, 3),
            },
        )

    def _do(self, name: str, fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        forgotten = [key for key in self._drained() if self.holds.pop(key, None) is not None]
        began = time.monotonic()
        answers = self._group.order(name, deadline_s=self._pace.deadline_s(name), forgotten=forgotten, **fields)
        self._pace.took(name, time.monotonic() - began)
        self._losses.did(name)
        return answers

    def _drained(self) -> list[int]:
        return [self._forgotten.popleft() for _ in range(len(self._forgotten))]

    def _on_loss(self, lost: RankLost, order: str | None) -> None:
        self._losses.lost(order, up_s=time.monotonic() - self._since if self._up else 0.0)
        if self._up:
            self._up = False
            self.life += 1
            self.holds.clear()
            self._watcher.lost()
        self._why = lost.reason
        if not self._closing.is_set():
            seconds = round(time.monotonic() - self._since, 3) if self._since else 0.0
            self._watcher.event(
                "rank_lost", {"rank": lost.rank, "reason": lost.reason, "epoch": self._group.epoch, "seconds": seconds}
            )
