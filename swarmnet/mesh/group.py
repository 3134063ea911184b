"""The ranks of this peer, as the peer process drives them: started together, ordered together, ended together.

Ranks share one fate. One that ends, fails or lets a deadline pass takes the others with it, since they may sit in a
collective that nobody will join: all are killed and reaped, `RankLost` says which rank it was and how it ended, and
`start` begins the next mesh epoch. The peer process is never in a process group, and has no deadline of torch's to wait
for: a rank that dies shows at the end of its line, within milliseconds. Knows no model: what an order means is the
program's business.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from swarmnet import telemetry
from swarmnet.errors import BadMessage, Overflow, RankLost, Refused, RejectCode
from swarmnet.mesh.rank_line import Packet, PeerEnd, packed
from swarmnet.mesh.rank_starter import RankProcess, RankStarter, StarterLost, best_starter
from swarmnet.mesh.shared import Shared, anonymous_file

log = telemetry.get(__name__)

KILL_S = 30.0
"""How long a killed process may take to end: a driver that frees a device's memory takes its time."""

GRACE_S = 0.3
"""How long after one rank said that it failed others may yet turn out to have died before."""


class RankGroup:
    """All ranks of a peer. Blocking; one call at a time has the group, others wait for it, `close` for nobody.

    program: "package.module:factory"; each rank calls `factory(context)` (`mesh.rank.RankContext`) for the handler of
    its orders. devices: of each rank, in torch's words. deadline_s: of an order that names none.
    """

    def __init__(self, program: str, settings: Mapping[str, Any], *, devices: Sequence[str], deadline_s: float,
                 start_deadline_s: float = 120.0) -> None:
        self.epoch = 0
        self._program, self._settings, self._devices = program, settings, tuple(devices)
        self._deadline_s, self._start_deadline_s = deadline_s, start_deadline_s
        self._lock = threading.Lock()
        self._starter: RankStarter | None = None
        self._shared: list[Shared] = []
        self._ranks: list[_Rank] = []
        self._lost = RankLost(None, "the ranks have not been started")
        self._killing = threading.Lock()                # held while the list of processes to kill is read or replaced
        self._closed = False

    # ------------------------------------------------------------ what the peer process calls

    def start(self) -> None:
        """Start all ranks of the next epoch and return once each has made its handler. Ends those that run.

        Raises RankLost: none runs then, and it may be called again.
        """
        with self._lock:
            self._end(RankLost(None, "the ranks are being started again"))
            self.epoch += 1
            deadline = time.monotonic() + self._start_deadline_s
            began = time.monotonic()
            with _Store() as store:
                try:
                    self._start_processes(deadline)
                except (StarterLost, OSError) as error:
                    self._fail(RankLost(None, f"ranks could not be started: {error}"))
                for number, rank in enumerate(self._ranks):
                    rank.line.queue(packed({
                        "rank": number, "ranks": len(self._ranks), "device": self._devices[number],
                        "epoch": self.epoch, "program": self._program, "settings": self._settings,
                        "memory": [each.id for each in self._shared], "store": store.path,
                    }), store.descriptor)
                    rank.map()
                self._exchange("start", deadline, self._start_deadline_s)
            log.info("ranks_started", epoch=self.epoch, ranks=len(self._ranks), seconds=time.monotonic() - began)

    def share(self, num_bytes: int) -> Shared:
        """Memory that all ranks map, from their next order or start on, in every epoch. Raises ValueError, OSError."""
        with self._lock:
            assert not self._closed
            self._shared.append(Shared(len(self._shared), num_bytes))
            return self._shared[-1]

    def order(self, name: str, /, deadline_s: float | None = None, **fields: Any) -> list[Packet]:
        """The same order to all ranks; their answers, by rank.

        fields: JSON. deadline_s: how long the slowest may take. Raises BadMessage, Refused or Overflow if every rank
        raised just that; the ranks live on. Raises RankLost; none lives then, and the order may be half done. Raises
        TypeError, ValueError, before anything is sent, if a field is no JSON.
        """
        data = packed({"order": name, "fields": fields})
        with self._lock:
            self._must_run()
            limit_s = self._deadline_s if deadline_s is None else deadline_s
            for rank in self._ranks:
                rank.order(data)
            answers = self._exchange(name, time.monotonic() + limit_s, limit_s)
            return self._agreed(name, answers)

    def check(self) -> None:
        """Raises RankLost if a rank has ended since the last order; the others are ended. Takes microseconds."""
        with self._lock:
            self._must_run()
            self._listen([None] * len(self._ranks), 0.0, "waiting for an order")

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; none while no rank runs."""
        return tuple(rank.process.pid for rank in self._ranks)

    def stop(self) -> None:
        """End all ranks; `start` begins anew. An order under way is ended first."""
        self._kill()
        with self._lock:
            self._end(RankLost(None, "the ranks have been stopped"))

    def close(self) -> None:
        """End all ranks and let go of everything. An order under way raises RankLost at once. May be called again."""
        self._closed = True
        self._kill()
        with self._lock:
            self._end(RankLost(None, "the ranks have been stopped for good"))
            if self._starter is not None:
                self._starter.close()
                self._starter = None
            for shared in self._shared:
                shared.close()
            self._shared.clear()

    # ------------------------------------------------------------ beginning

    def _start_processes(self, deadline: float) -> None:
        if self._closed:
            raise StarterLost("the group is closed")
        if self._starter is None:
            self._starter = best_starter(self._program.partition(":")[0])
        try:
            for number in range(len(self._devices)):
                ours, theirs = socket.socketpair()
                with theirs:
                    line = PeerEnd(ours)
                    try:
                        process = self._starter.start(theirs, f"swarmnet-rank-{number}", deadline)
                    except BaseException:
                        line.close()
                        raise
                with self._killing:
                    self._ranks.append(_Rank(number, line, process, self._shared))
        except BaseException:
            starter, self._starter = self._starter, None        # another zygote next time
            starter.close()
            raise

    def _must_run(self) -> None:
        if not self._ranks:
            raise self._lost

    # ------------------------------------------------------------ orders and answers

    def _exchange(self, what: str, deadline: float, limit_s: float) -> list[Packet]:
        """Send what is queued; one answer of each rank."""
        answers: list[Packet | None] = [None] * len(self._ranks)
        while (missing := [n for n, answer in enumerate(answers) if answer is None]):
            left = deadline - time.monotonic()
            if left <= 0:
                self._fail(self._late(missing, what, limit_s))
            self._listen(answers, left, what)
        return [answer for answer in answers if answer is not None]

    def _listen(self, answers: list[Packet | None], left: float, what: str) -> None:
        """Send and receive once, waiting up to `left` seconds for something to happen."""
        poll = select.poll()
        by_fd = {}
        for rank in self._ranks:
            poll.register(rank.line, select.POLLIN | (0 if rank.flush() else select.POLLOUT))
            by_fd[rank.line.fileno()] = rank
        for fd, _ in poll.poll(left * 1000):
            rank = by_fd[fd]
            try:
                packet = rank.line.receive()
            except EOFError:
                self._fail(self._cause(None, what))
            if packet is None:
                continue
            if "failed" in packet:
                self._fail(self._cause((packet["at"], rank.number, packet["failed"]), what))
            answers[rank.number] = packet

    def _agreed(self, name: str, answers: list[Packet]) -> list[Packet]:
        raised = [answer.get("raised") for answer in answers]
        if not any(raised):
            return [answer["done"] for answer in answers]
        first = raised[0]
        for each in raised:
            if each is None or first is None or (each["class"], each["code"]) != (first["class"], first["code"]):
                other = next(n for n, one in enumerate(raised) if one != first)
                self._fail(RankLost(None, f"ranks disagree about {name!r}: {_short(0, first)}; "
                                          f"{_short(other, raised[other])}"))
        assert first is not None
        raise _error(first)

    # ------------------------------------------------------------ ends

    def _cause(self, failed: tuple[float, int, str] | None, what: str) -> RankLost:
        """Who is to blame, now that one rank's line has ended or it said that it `failed`.

        A rank that died before the others failed is the cause, and so is the first of those that failed.
        """
        reports = [failed] if failed else []
        silent = {rank.number: rank for rank in self._ranks if not failed or rank.number != failed[1]}
        deadline = time.monotonic() + GRACE_S
        while silent and time.monotonic() < deadline:
            poll = select.poll()
            by_fd = {rank.line.fileno(): rank for rank in silent.values()}
            for fd in by_fd:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                rank = by_fd[fd]
                try:
                    packet = rank.line.receive()
                except EOFError:
                    rank.process.kill()
                    rank.process.wait(time.monotonic() + KILL_S)
                    return RankLost(rank.number, f"rank {rank.number} {_ended(rank.process.code())} during {what!r}")
                if packet is not None and "failed" in packet:
                    reports.append((packet["at"], rank.number, packet["failed"]))
                    del silent[rank.number]
        _, number, words = min(reports)
        return RankLost(number, f"rank {number} failed during {what!r}: {words}")

    def _late(self, missing: list[int], what: str, limit_s: float) -> RankLost:
        stopped = [number for number in missing if _is_stopped(self._ranks[number].process.pid)]
        culprits = stopped or missing
        words = f"{'ranks' if len(culprits) > 1 else 'rank'} {', '.join(map(str, culprits))}"
        said = "was stopped by a signal and gave" if stopped else "gave"
        return RankLost(culprits[0] if len(culprits) == 1 else None,
                        f"{words} {said} no answer to {what!r} within {limit_s:g} s")

    def _fail(self, lost: RankLost) -> NoReturn:
        if self._closed:
            lost = RankLost(None, "the ranks have been stopped for good")
        self._end(lost)
        log.warning("ranks_lost", epoch=self.epoch, rank=lost.rank, reason=lost.reason)
        raise lost

    def _end(self, lost: RankLost) -> None:
        """Kill and reap all ranks that run; whoever asks for them next hears `lost`."""
        self._lost = lost
        self._kill()
        deadline = time.monotonic() + KILL_S
        for rank in self._ranks:
            if not rank.process.wait(deadline):
                log.error("rank_does_not_end", rank=rank.number, pid=rank.process.pid)
        with self._killing:
            ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.line.close()
            rank.process.close()

    def _kill(self) -> None:
        with self._killing:
            for rank in self._ranks:
                rank.process.kill()


class _Rank:
    """One rank that runs: its process, our end of its line, and how much of the shared memory it has."""

    def __init__(self, number: int, line: PeerEnd, process: RankProcess, shared: list[Shared]) -> None:
        self.number, self.line, self.process, self._shared = number, line, process, shared
        self.mapped = 0

    def map(self) -> None:
        """Send the memory that it does not have yet ahead of what is queued next."""
        for each in self._shared[self.mapped:]:
            self.line.queue(packed({"map": each.id}), each.descriptor)
        self.mapped = len(self._shared)

    def order(self, data: bytes) -> None:
        """Queue an order, behind memory that it may speak of."""
        self.map()
        self.line.queue(data)

    def flush(self) -> bool:
        """Whether nothing is left to send. A line that has ended shows when it is read."""
        try:
            return self.line.flush()
        except OSError:
            return True


class _Store:
    """Where ranks meet before they are a group: a file that only they have (Linux), or one that is gone afterwards."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self.path = ""

    def __enter__(self) -> _Store:
        if sys.platform == "linux":
            self.descriptor = anonymous_file("swarmnet-store")
        else:
            self.path = str(Path(tempfile.mkdtemp(prefix="swarmnet-ranks-")) / "store")
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
        else:
            shutil.rmtree(Path(self.path).parent, ignore_errors=True)


def _ended(code: int | None) -> str:
    if code is None:
        return "ended, nobody can tell how,"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "tT"


def _short(rank: int, raised: Packet | None) -> str:
    what = "was done" if raised is None else f"raised {raised['class']} {raised['code'] or ''}: {raised['reason']}"
    return f"on rank {rank} it {what}"


def _error(raised: Packet) -> BadMessage | Refused | Overflow:
    kind, facts = raised["class"], raised["facts"]
    if kind == "Overflow":
        return Overflow(raised["reason"], **facts)
    made = BadMessage if kind == "BadMessage" else Refused
    return made(RejectCode(raised["code"]), raised["reason"], **facts)
