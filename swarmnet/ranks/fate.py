"""What comes over the lines of ranks, and why ranks are lost: which one is to blame, and how it ended.

When one rank is gone the others fail as well, in whatever collective they share; when one hangs, so do they. Who failed
first, and how its process ended, is told in words for a person; nothing is decided by it.
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from swarmnet.errors import RankLost
from swarmnet.ranks.line import Line, LineEnded, Packet, packed
from swarmnet.ranks.memory import SharedMemory
from swarmnet.ranks.starter import ChildProcess

KILL_S = 30.0
"""How long a killed process may take to end: a driver that frees a device's memory takes its time."""

GRACE_S = 0.3
"""How long after one rank said that it failed another may yet turn out to have died before."""

DUMP = signal.SIGUSR1
"""Ends a rank that hangs, with the stacks of its threads on stderr."""

DUMP_S = 0.3
"""How long ranks that hang may take to say where."""


class Rank:
    """One rank that runs: its process, our end of its line, and how much of the shared memory it has."""

    def __init__(self, number: int, line: Line, process: ChildProcess, shared: list[SharedMemory]) -> None:
        self.number, self.line, self.process = number, line, process
        self._shared, self._mapped = shared, 0

    def send(self, data: bytes, descriptor: int | None = None) -> None:
        """Send a packet. If the rank is gone, that shows when its line is read, behind its last words."""
        with contextlib.suppress(LineEnded):
            self.line.send(data, descriptor)

    def map(self) -> None:
        """Send the memory that it does not have yet."""
        for each in self._shared[self._mapped :]:
            self.send(packed({"map": each.id}), each.descriptor)
        self._mapped = len(self._shared)


def hear(ranks: Sequence[Rank], left: float) -> tuple[list[tuple[Rank, Packet]], list[Rank]]:
    """Wait up to `left` seconds for something to happen, then receive up to one packet each.

    Returns the packets, and the ranks whose lines have ended.
    """
    poll = select.poll()
    for rank in ranks:
        poll.register(rank.line, select.POLLIN)
    events = dict(poll.poll(left * 1000))
    packets: list[tuple[Rank, Packet]] = []
    ended = []
    for rank in ranks:
        if rank.line.fileno() in events:
            try:
                packets.append((rank, rank.line.hear()[0]))
            except LineEnded:
                ended.append(rank)
    return packets, ended


# ---------------------------------------------------------------- who is to blame

Failure = tuple[float, int, str]
"""When a rank failed (time.monotonic), its number, its last words."""


def cause(ended: list[Rank], failed: list[Failure], silent: list[Rank], what: str) -> RankLost:
    """Why the ranks are lost. A rank that died without a word comes first: others fail because it is gone.

    Otherwise it is the first that failed. silent: those of which nothing is known; they have GRACE_S to show.
    """
    deadline = time.monotonic() + GRACE_S
    while not ended and silent and (left := deadline - time.monotonic()) > 0:
        packets, ended = hear(silent, left)
        failed = failed + [
            (packet["at"], rank.number, packet["failed"]) for rank, packet in packets if "failed" in packet
        ]
        known = {rank.number for rank, _ in packets}
        silent = [rank for rank in silent if rank.number not in known]
    _, number, words = min(failed, default=(0.0, 0, ""))
    if not ended:  # the words that came first: later ones are of ranks whose partner had failed
        return RankLost(number, f"rank {number} failed during {what!r}: {words}")
    dead = ended[0]
    code = dead.process.code() if dead.process.wait(time.monotonic() + KILL_S) else None
    also = f"; rank {number} failed: {words}" if failed else ""
    return RankLost(dead.number, f"rank {dead.number} {_ended(code)} during {what!r}{also}")


def late(missing: Sequence[Rank], what: str, limit_s: float) -> RankLost:
    """Why the ranks are lost if these gave no answer in time. Those that can say on stderr where they are."""
    stopped = [rank for rank in missing if _is_stopped(rank.process.pid)]
    hanging = [rank for rank in missing if rank not in stopped]
    for rank in hanging:  # a stopped process can say nothing
        rank.process.send(DUMP)
    deadline = time.monotonic() + DUMP_S
    for rank in hanging:
        rank.process.wait(deadline)
    culprits = [rank.number for rank in stopped or missing]  # who waits for a stopped one hangs by no fault of its own
    words = f"{'ranks' if len(culprits) > 1 else 'rank'} {', '.join(map(str, culprits))}"
    said = "stopped by a signal, gave" if stopped else "gave"
    return RankLost(
        culprits[0] if len(culprits) == 1 else None, f"{words} {said} no answer to {what!r} within {limit_s:g} s"
    )


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it is gone
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    return False


def _ended(code: int | None) -> str:
    if code is None:
        return "ended, nobody can tell how,"
    if code >= 0:
        return f"left with exit code {code}"
    names = {int(number): number.name for number in signal.Signals}
    return f"was ended by {names.get(-code, f'signal {-code}')}"
