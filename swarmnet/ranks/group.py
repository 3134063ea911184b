"""The ranks of this peer, as the peer process drives them: started together, ordered together, ended together.

Ranks share one fate. One that ends, fails or lets a deadline pass takes the others with it, since they may sit in a
collective that nobody will join: all are killed and reaped, `RankLost` says which rank it was and how it ended, and
`start` begins the next mesh epoch. The peer process is never in a process group, and has no deadline of torch's to wait
for: a rank that dies shows at the end of its line, within milliseconds. Knows no model: what an order means is the
program's business.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from swarmnet import telemetry
from swarmnet.errors import RankLost
from swarmnet.ranks.fate import KILL_S, Rank, cause, hear, late
from swarmnet.ranks.line import Line, Packet, disagreement, error_of, packed
from swarmnet.ranks.memory import SharedMemory, anonymous_file
from swarmnet.ranks.shared_comm import SharedBuffers
from swarmnet.ranks.starter import ChildCall, ForkerLost, ForkStarter, Starter

log = telemetry.get(__name__)

CLOSED = "the group of ranks is closed"

CALL = ("-m", "swarmnet.ranks")
"""A rank, with its end of the line as the last argument."""

PRELOAD = (
    "torch",
    "torch.distributed",
    "swarmnet.ranks.process",
    "torch.fx.experimental.symbolic_shapes",  # the first backward imports it, and with it sympy
)
"""What every rank imports, beside its program. Importing these starts no thread and touches no device."""

WRITE_S = 5.0
"""How long a rank may take to read a packet that its line does not hold; packets are small, and lines hold many."""

MAP_BYTES_PER_S = 1 << 28
"""Slower than any rank maps memory, and registers it with CUDA."""


class RankGroup:
    """All ranks of a peer. Blocking; one call at a time has the group, others wait for it, `close` for nobody.

    Args:
        program: "package.module:factory"; each rank calls `factory(context)` (`ranks.process.RankContext`) for the
            handler of its orders.
        devices: of each rank, in torch's words.
        deadline_s: of an order that names none.
        start_deadline_s: of a start, besides what shared memory takes (`MAP_BYTES_PER_S`).
        preload: modules that ranks import beside their program, once for all starts.
    """

    def __init__(
        self,
        program: str,
        settings: Mapping[str, Any],
        *,
        devices: Sequence[str],
        deadline_s: float,
        start_deadline_s: float = 120.0,
        preload: Sequence[str] = (),
    ) -> None:
        self.epoch = 0
        self._program, self._settings, self._devices = program, settings, tuple(devices)
        self._modules = (*PRELOAD, *preload, program.partition(":")[0])
        self._deadline_s, self._start_deadline_s = deadline_s, start_deadline_s
        self._lock = threading.Lock()
        self._starter: Starter | None = None
        self._shared: list[SharedMemory] = []
        self._ranks: list[Rank] = []
        self._lost = RankLost(None, "the ranks have not been started")
        # `close` does not wait for the call that has `_lock`: under `_killing` it sets `_closed`, kills all in `_ranks`
        # (`_join` kills who comes later), and breaks off what `_starting` is at.
        self._killing = threading.Lock()
        self._closed = False
        self._starting: Starter | None = None
        # CUDA ranks have nccl.
        self._buffers = self.share(SharedBuffers.num_bytes(len(devices))) if set(devices) == {"cpu"} else None

    # ------------------------------------------------------------ what the peer process calls

    def start(self, deadline_s: float | None = None) -> None:
        """Start all ranks of the next epoch and return once each has made its handler. Ends those that run.

        deadline_s: how long that may take, if not what the group grants. Raises RankLost: none runs then, and it may be
        called again, unless the group is closed.
        """
        with self._lock:
            self._must_be_open()
            self._end(RankLost(None, "the ranks are being started again"))  # not one of an earlier epoch may live on
            self.epoch += 1
            began = time.monotonic()
            mapping_s = sum(each.num_bytes for each in self._shared) / MAP_BYTES_PER_S
            limit_s = self._start_deadline_s + mapping_s if deadline_s is None else deadline_s
            deadline = began + limit_s
            # Where ranks meet before they are a group: a file that nobody else has.
            store = anonymous_file("swarmnet-store")
            try:
                self._fork(deadline)
                for rank in self._ranks:
                    hello = {
                        "rank": rank.number,
                        "ranks": len(self._ranks),
                        "device": self._devices[rank.number],
                        "epoch": self.epoch,
                        "program": self._program,
                        "settings": self._settings,
                        "memory": [each.id for each in self._shared],
                        "buffers": None if self._buffers is None else self._buffers.id,
                    }
                    rank.send(packed(hello), store)
                    rank.map()
                self._exchange("start", deadline, limit_s)
            finally:
                os.close(store)
            log.info("ranks_started", epoch=self.epoch, ranks=len(self._ranks), seconds=time.monotonic() - began)

    def share(self, num_bytes: int) -> SharedMemory:
        """Memory that all ranks map, from their next order or start on, in every epoch. Raises ValueError, OSError."""
        with self._lock:
            self._must_be_open()
            self._shared.append(SharedMemory(len(self._shared), num_bytes))
            return self._shared[-1]

    def order(self, name: str, /, deadline_s: float | None = None, **fields: Any) -> list[Packet]:
        """The same order to all ranks; their answers, by rank.

        fields: JSON. deadline_s: how long the slowest may take, once other threads' orders are done. Raises BadMessage,
        Refused or Overflow if every rank raised just that; the ranks live on. Raises RankLost; none lives then, and the
        order may be half done. Raises TypeError, ValueError, before anything is sent, if a field is no JSON.
        """
        data = packed({"order": name, "fields": fields})  # raises before any rank has heard of it
        with self._lock:
            self._must_run()
            for rank in self._ranks:
                rank.map()
                rank.send(data)
            limit_s = self._deadline_s if deadline_s is None else deadline_s
            return self._agreed(name, self._exchange(name, time.monotonic() + limit_s, limit_s))

    def check(self) -> None:
        """Raises RankLost if a rank has ended since the last order; the others are ended. Takes microseconds."""
        with self._lock:
            self._must_run()
            self._listen([None] * len(self._ranks), 0.0, "waiting for an order")

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; none while no rank runs."""
        return tuple(rank.process.pid for rank in self._ranks)

    def close(self) -> None:
        """End all ranks and let go of everything. An order or start under way raises RankLost at once.

        May be called again; nothing opens the group once more.
        """
        with self._killing:
            self._closed = True
            for rank in self._ranks:
                rank.process.send(signal.SIGKILL)
            if self._starting is not None:
                self._starting.abort()
        with self._lock:
            self._end(RankLost(None, CLOSED))
            if self._starter is not None:
                self._starter.close()
                self._starter = None
            for shared in self._shared:
                shared.close()
            self._shared.clear()

    # ------------------------------------------------------------ beginning

    def _fork(self, deadline: float) -> None:
        """Have all rank processes started, `_ranks` in order of number. Raises RankLost; none runs then."""
        try:
            self._let_go_of_lost_starter()
            # The process that forks ranks outlives them: only the first start imports anything.
            if self._starter is None:
                self._starter = ForkStarter(self._modules)
            with self._killing:
                if self._closed:
                    raise ForkerLost(CLOSED)
                self._starting = self._starter
            for number in range(len(self._devices)):
                self._join(_begun(self._starter, number, self._shared, deadline))
        except (ForkerLost, OSError) as error:
            lost = RankLost(None, f"the ranks could not be started: {error}")
            self._end(lost)
            self._let_go_of_lost_starter()  # another one next time
            self._fail(lost)
        finally:
            with self._killing:
                self._starting = None

    def _let_go_of_lost_starter(self) -> None:
        if self._starter is not None and self._starter.lost():
            self._starter.close()
            self._starter = None

    def _join(self, rank: Rank) -> None:
        with self._killing:
            self._ranks.append(rank)
            if self._closed:  # `close` did not see this one
                rank.process.send(signal.SIGKILL)

    def _must_be_open(self) -> None:
        if self._closed:
            raise RankLost(None, CLOSED)

    def _must_run(self) -> None:
        if not self._ranks:
            raise RankLost(self._lost.rank, self._lost.reason)

    # ------------------------------------------------------------ orders and answers

    def _exchange(self, what: str, deadline: float, limit_s: float) -> list[Packet]:
        """One answer of each rank."""
        answers: list[Packet | None] = [None] * len(self._ranks)
        try:
            while missing := [rank for rank in self._ranks if answers[rank.number] is None]:
                left = deadline - time.monotonic()
                # what has come by now counts, however late it is when we look: we may have been stopped meanwhile
                if not self._listen(answers, max(left, 0.0), what) and left <= 0:
                    self._fail(late(missing, what, limit_s))
        except BaseException as error:  # answers that nobody waits for would be taken for the next
            if self._ranks:
                self._end(RankLost(None, f"{what!r} was broken off by {type(error).__name__}"))
            raise
        return [answer for answer in answers if answer is not None]

    def _listen(self, answers: list[Packet | None], left: float, what: str) -> bool:
        """Receive once, waiting up to `left` seconds for something to happen; whether it did.

        Answers are put in `answers`, by rank. Raises RankLost, all ranks ended, if one has failed or ended.
        """
        packets, ended = hear(self._ranks, left)
        failed = []
        for rank, packet in packets:
            if "failed" in packet:
                failed.append((packet["at"], rank.number, packet["failed"]))
            else:
                answers[rank.number] = packet
        if failed or ended:
            known = {number for _, number, _ in failed}
            silent = [rank for rank in self._ranks if answers[rank.number] is None and rank.number not in known]
            self._fail(cause(ended, failed, silent, what))
        return bool(packets)

    def _agreed(self, name: str, answers: list[Packet]) -> list[Packet]:
        """What all ranks have done, or have raised."""
        raised = [answer.get("raised") for answer in answers]
        if not any(raised):
            return [answer["done"] for answer in answers]
        if (difference := disagreement(raised)) is not None:  # their weights would drift apart unseen
            self._fail(RankLost(None, f"ranks disagree about {name!r}: {difference}"))
        raise error_of(answers[0]["raised"])

    # ------------------------------------------------------------ ends

    def _fail(self, lost: RankLost) -> NoReturn:
        """End all ranks and raise `lost`, or that the group is closed."""
        if not self._closed:
            log.warning("ranks_lost", epoch=self.epoch, rank=lost.rank, reason=lost.reason)
        else:
            lost = RankLost(None, CLOSED)
        self._end(lost)
        raise lost

    def _end(self, lost: RankLost) -> None:
        """Kill and reap all ranks that run; whoever asks for them next hears `lost`."""
        self._lost = lost
        for rank in self._ranks:  # all first, then wait: each needs its time to end
            rank.process.send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        for rank in self._ranks:
            if not rank.process.wait(deadline):
                log.error("rank_does_not_end", rank=rank.number, pid=rank.process.pid)
        with self._killing:
            ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.line.close()
            rank.process.close()


def _begun(starter: Starter, number: int, shared: list[SharedMemory], deadline: float) -> Rank:
    """A rank's process and our end of its line. Raises ForkerLost, OSError."""
    ours, theirs = socket.socketpair()
    line = Line(ours, limit_s=WRITE_S)
    with theirs:
        try:
            process = starter.start(ChildCall(CALL, f"swarmnet-rank-{number}", line=theirs), deadline)
            return Rank(number, line, process, shared)
        except BaseException:
            line.close()
            raise
