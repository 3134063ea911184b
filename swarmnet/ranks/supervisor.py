"""The rank supervisor: ranks are started together, ordered together, ended together, and started again.

`RankGroup` drives the processes. Ranks share a *mesh epoch*. A rank that ends, fails or lets a deadline pass takes the
others with it, because they may wait in a collective for it: all are killed and reaped, and `RankLost` says which rank
it was and how it ended. The peer process is never in a process group, and has no deadline of torch's to wait for: a
rank that dies shows at the end of its channel, within milliseconds.

`RankSupervisor` starts the next epoch, or gives up. What ranks hold is of two kinds. Sums and microbatches in flight
are lost with them, and an order that needs them is refused. Weights and moments are not lost: after each start the
ranks read them again (`load`), so an order that needs nothing else is repeated until it is done.

Knows no tensors. What an order means is the business of `ranks.program`.
"""

from __future__ import annotations

import contextlib
import operator
import os
import select
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from swarmnet import telemetry
from swarmnet.errors import DeviceFull, MeshFailed, RankLost, Refused, RejectCode
from swarmnet.pacing import doubled_s
from swarmnet.ranks.channel import ChannelClosed, ChildChannel, Packet, channel_pair, disagreement, error_of, packed
from swarmnet.ranks.launcher import ChildCall, ChildProcess, Launcher, LauncherLost
from swarmnet.ranks.memory import Place, SharedMemory, anonymous_file
from swarmnet.telemetry.kinds import OnEvent

log = telemetry.get(__name__)

PRELOAD = (
    "torch",
    "torch.distributed",
    "swarmnet.ranks.process",
    "torch.fx.experimental.symbolic_shapes",  # the first backward imports it, and with it sympy
)
"""What every rank imports, besides its program. Importing these starts no thread and touches no device."""

WRITE_S = 5.0
"""How long a rank may take to read a packet that its channel does not hold; packets are small, and channels hold many.
"""

START_S = 120.0
"""How long a start may take. Large places of shared memory add nothing: no rank touches or pins them as it starts."""

KILL_S = 30.0
"""How long a killed process may take to end: a driver that frees a device's memory takes its time."""

GRACE_S = 0.3
"""How long after one rank failed another may still turn out to have died before."""

DUMP = signal.SIGUSR1
"""Ends a rank that hangs, with the stacks of its threads on stderr."""

DUMP_S = 0.3
"""How long ranks that hang may take to write their stacks."""


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """One rank that runs: its process, and our end of its channel."""

    number: int
    channel: ChildChannel
    process: ChildProcess


class RankGroup:
    """All ranks of a peer. Blocking; one call at a time has the group, others wait for it, but `close` does not.

    Args:
        program: "package.module:factory"; each rank calls `factory(context)` (`ranks.process.RankContext`) for the
            handler of its orders.
        settings: JSON, read at each start.
        devices: of each rank, in torch's words.
        deadline_s: of an order that names none.
        memory: what ranks share with this process, by name.
        preload: modules that ranks import besides their program, once for all starts.
    """

    def __init__(
        self,
        program: str,
        settings: Mapping[str, Any],
        *,
        devices: Sequence[str],
        deadline_s: float,
        memory: Mapping[str, Place] | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        """Raises ValueError, OSError: the system gives no such memory."""
        self.epoch = 0
        self._devices = tuple(devices)
        self._modules = (*PRELOAD, *preload, program.partition(":")[0])
        self._deadline_s = deadline_s
        self._hello = {"program": program, "settings": settings, "memory": memory or {}, "ranks": len(devices)}
        self.memory = SharedMemory(memory or {})
        self._lock = threading.Lock()
        self._launcher: Launcher | None = None
        self._ranks: list[Rank] = []
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; none while no rank runs."""
        return tuple(rank.process.pid for rank in self._ranks)

    def start(self, deadline_s: float = START_S) -> None:
        """Start all ranks of the next epoch and return once each has made its handler. Ends those that run.

        deadline_s: how long that may take. Raises RankLost: none runs then, and it may be called again, unless the
        group is closed.
        """
        with self._lock:
            self._must_be_open()
            self._end()  # no rank of an earlier epoch may live on
            self.epoch += 1
            deadline = time.monotonic() + deadline_s
            hello = self._hello | {"epoch": self.epoch}
            store = anonymous_file("swarmnet-store")  # ranks meet in it before they are a process group
            try:
                self._launch(store, deadline)
                for rank in self._ranks:
                    rank.channel.send(packed(hello | {"rank": rank.number, "device": self._devices[rank.number]}))
                self._exchange("start", deadline, deadline_s)
            except (LauncherLost, OSError) as error:
                self._fail(RankLost(None, f"the ranks could not be started: {error}"))
            finally:
                os.close(store)

    def order(self, name: str, /, deadline_s: float | None = None, **fields: Any) -> list[Packet]:
        """The same order to all ranks; their answers, by rank.

        fields: JSON. deadline_s: how long the slowest may take, once other threads' orders are done. Raises BadMessage,
        Refused or Overflow if every rank raised just that; the ranks live on. Raises RankLost; none lives then, and the
        order may be half done. Raises TypeError, ValueError, before anything is sent, if a field is no JSON.
        """
        data = packed({"order": name, "fields": fields})
        with self._lock:
            self._must_run()
            for rank in self._ranks:
                rank.channel.send(data)
            limit_s = self._deadline_s if deadline_s is None else deadline_s
            answers = self._exchange(name, time.monotonic() + limit_s, limit_s)
            raised = [answer.get("raised") for answer in answers]
            if (difference := disagreement(raised)) is not None:  # their weights would drift apart unseen
                self._fail(RankLost(None, f"ranks disagree about {name!r}: {difference}"))
            if raised[0] is not None:
                raise error_of(raised[0])
            return [answer["done"] for answer in answers]

    def check(self) -> None:
        """Raises RankLost if a rank has ended since the last order; the others are ended. Takes microseconds."""
        with self._lock:
            self._must_run()
            self._listen({}, 0.0, "waiting for an order")

    def close(self) -> None:
        """End all ranks and let go of everything. An order or start under way raises RankLost at once.

        May be called again; the group stays closed.
        """
        self._closed = True
        # Not waiting for the call that has `_lock`: the fork server ends the ranks, and that call finds them gone.
        if (launcher := self._launcher) is not None:
            launcher.abort()
        with self._lock:
            self._end()
            if self._launcher is not None:
                self._launcher.close()
                self._launcher = None
            self.memory.close()

    def _must_be_open(self) -> None:
        if self._closed:
            raise RankLost(None, "the group of ranks is closed")

    def _must_run(self) -> None:
        self._must_be_open()
        if not self._ranks:
            raise RankLost(None, "no rank runs")

    def _launch(self, store: int, deadline: float) -> None:
        """Have all rank processes started, `_ranks` in order of number. Raises RankLost, LauncherLost, OSError."""
        # The fork server outlives ranks: only the first start imports anything.
        if self._launcher is not None and self._launcher.lost():
            self._launcher.close()
            self._launcher = None
        self._launcher = launcher = self._launcher or Launcher(self._modules)
        self._must_be_open()  # `close` may have come before it could see this launcher
        for number in range(len(self._devices)):
            ours, theirs = channel_pair()
            channel = ChildChannel(ours, limit_s=WRITE_S)
            with theirs, contextlib.ExitStack() as undo:
                undo.callback(channel.close)
                descriptors = theirs.fileno(), store, self.memory.descriptor
                call = ChildCall(("-m", "swarmnet.ranks"), f"swarmnet-rank-{number}", descriptors=descriptors)
                self._ranks.append(Rank(number, channel, launcher.start(call, deadline)))
                undo.pop_all()

    def _exchange(self, what: str, deadline: float, limit_s: float) -> list[Packet]:
        """One answer of each rank."""
        answers: dict[int, Packet] = {}
        while missing := [rank for rank in self._ranks if rank.number not in answers]:
            left = deadline - time.monotonic()
            # what has come by now counts, however late it is when we look: we may have been stopped meanwhile
            if not self._listen(answers, max(left, 0.0), what) and left <= 0:
                self._fail(late(missing, what, limit_s))
        return [answers[rank.number] for rank in self._ranks]

    def _listen(self, answers: dict[int, Packet], left: float, what: str) -> bool:
        """Receive once, waiting up to `left` seconds for something to happen; whether it did.

        Raises RankLost, all ranks ended, if one has failed or ended.
        """
        packets, ended = receive(self._ranks, left)
        answers |= packets
        if ended or any("failed" in packet for packet in packets.values()):
            self._fail(cause(self._ranks, answers, ended, what))
        return bool(packets)

    def _fail(self, lost: RankLost) -> NoReturn:
        """End all ranks and raise `lost`, or that the group is closed."""
        self._end()
        self._must_be_open()
        raise lost

    def _end(self) -> None:
        """Kill and reap all ranks that run."""
        for rank in self._ranks:  # all first, then wait: each needs its time to end
            rank.process.send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        for rank in self._ranks:
            if not rank.process.wait(deadline):
                log.error("rank_does_not_end", rank=rank.number, pid=rank.process.pid)
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.channel.close()
            rank.process.close()


def receive(ranks: Sequence[Rank], left: float) -> tuple[dict[int, Packet], list[Rank]]:
    """Wait up to `left` seconds for something to happen, then receive up to one packet each.

    Returns the packets, by number of the rank, and the ranks with a closed channel.
    """
    poll = select.poll()
    for rank in ranks:
        poll.register(rank.channel, select.POLLIN)
    events = dict(poll.poll(left * 1000))
    packets, ended = dict[int, Packet](), list[Rank]()
    for rank in ranks:
        if rank.channel.fileno() in events:
            try:
                packets[rank.number] = rank.channel.receive()[0]
            except ChannelClosed:
                ended.append(rank)
    return packets, ended


# ---------------------------------------------------------------- why ranks are lost, in words


def cause(ranks: Sequence[Rank], answers: Mapping[int, Packet], ended: Sequence[Rank], what: str) -> RankLost:
    """Why the ranks are lost. A rank that died without a packet comes first: others fail because it is gone.

    Otherwise it is the first that failed. Ranks without an answer so far have GRACE_S to die or to give one.
    """
    answers, deadline = dict(answers), time.monotonic() + GRACE_S
    while not ended and (silent := [rank for rank in ranks if rank.number not in answers]):
        if (left := deadline - time.monotonic()) <= 0:
            break
        packets, ended = receive(silent, left)
        answers |= packets
    failed = [(packet["at"], number, packet["failed"]) for number, packet in answers.items() if "failed" in packet]
    # The words that came first: later ones come from ranks that lost a partner.
    _, number, words = min(failed, default=(0.0, 0, ""))
    if not ended:
        return RankLost(number, f"rank {number} failed during {what!r}: {words}")
    dead = ended[0]
    code = dead.process.code() if dead.process.wait(time.monotonic() + KILL_S) else None
    if code is None or code >= 0:
        how = "ended with an unknown exit code" if code is None else f"left with exit code {code}"
    else:
        how = f"was ended by {next((each.name for each in signal.Signals if each == -code), f'signal {-code}')}"
    also = f"; rank {number} failed: {words}" if failed else ""
    return RankLost(dead.number, f"rank {dead.number} {how} during {what!r}{also}")


def late(missing: Sequence[Rank], what: str, limit_s: float) -> RankLost:
    """Why the ranks are lost if these gave no answer in time. They write their stacks to stderr."""
    for rank in missing:
        rank.process.send(DUMP)
    deadline = time.monotonic() + DUMP_S
    for rank in missing:
        rank.process.wait(deadline)
    numbers = [rank.number for rank in missing]
    words = f"{'ranks' if len(numbers) > 1 else 'rank'} {', '.join(map(str, numbers))}"
    return RankLost(
        numbers[0] if len(numbers) == 1 else None, f"{words} gave no answer to {what!r} within {limit_s:g} s"
    )


# ---------------------------------------------------------------- the next mesh epoch


MOST_SPARE_LOSSES = 4
"""So often in a row ranks may be lost in an order of an audit: once more and the peer would be given up."""


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """How long ranks may take for an order, how often they are started again, and after which pauses.

    order_s: for an order. Only a hang should reach it, because first orders build kernels and fill caches.
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
        return 0.0 if losses < 2 else doubled_s(self.pause_s, losses - 2)


class RankSupervisor:
    """Threads take turns by `lock`, which they may hold around several calls.

    on_lost: called when what ranks held is lost. load: fields of the order "load", by which ranks read the state as it
    is now. label: of the mesh, for people.
    """

    def __init__(
        self,
        group: RankGroup,
        on_lost: Callable[[], None],
        on_event: OnEvent,
        *,
        label: str,
        load: Callable[[], Mapping[str, Any]],
        backoff: RestartBackoff,
    ) -> None:
        self.lock = threading.RLock()
        self._group, self._on_lost, self._event, self._label, self._load = group, on_lost, on_event, label, load
        self._backoff = backoff
        # How often they were lost: since they finished work (None), and in each kind of order since one was done.
        # Finished work does not excuse an order that kills ranks whenever it comes: only that order, done, does.
        self._losses = Counter[str | None]()
        self._since: float | None = None  # when they were up; None: they are not
        self._why = ""
        self._forgotten: deque[int] = deque()
        self._closing = threading.Event()

    def forget(self, key: int) -> None:
        """Have ranks drop what they hold under `key`, with their next order. Any thread, at any time."""
        self._forgotten.append(key)

    def start(self) -> None:
        """Have the ranks up: at once if they are. Notices the death of idle ones.

        Raises MeshFailed: given up; DeviceFull: for want of memory.
        """
        with self.lock:
            if self._since is not None:
                try:
                    self._group.check()
                except RankLost as lost:
                    self._lost(lost, None)
            while self._since is None:
                self._begin()

    def order(
        self, name: str, /, *, repeat: bool = False, spare: bool = False, finishes: bool = False, **fields: Any
    ) -> list[Mapping[str, Any]]:
        """All ranks' answers, by rank. repeat: have the next ranks do it if these are lost. spare: an audit's, refused
        once ranks were lost by it too often: the peer can still train. finishes: done, it is a microbatch counted or
        evaluated, or a step taken: these ranks do work.

        Raises Refused(NOT_READY) if these are lost, before or meanwhile, or given up; DeviceFull if for want of memory;
        and what all ranks raise.
        """
        with self.lock:
            if spare and (times := self._losses[name]) >= MOST_SPARE_LOSSES:
                words = f"cannot recompute: ranks were lost {times} times in a row as they did"
                raise Refused(RejectCode.NOT_READY, words, order=name)
            while True:
                try:
                    self.start()
                except MeshFailed as failed:
                    raise Refused(RejectCode.NOT_READY, failed.message) from failed
                try:
                    answers = self._do(name, fields)
                    if finishes:
                        del self._losses[None]
                    return answers
                except RankLost as lost:
                    self._lost(lost, name)
                    if spare and self._losses[name] == MOST_SPARE_LOSSES:
                        log.warning("recomputing_stopped", order=name, then="audits get no answer from this peer")
                    if repeat:
                        continue
                    if _OUT_OF_MEMORY in lost.reason:
                        raise DeviceFull(lost.reason) from None
                    raise Refused(RejectCode.NOT_READY, "a rank of this peer was lost, and is started again") from lost

    def reload(self) -> None:
        """The state has been replaced. Ranks drop all they hold and read it; ranks that are not up, when they start."""
        with self.lock:
            if self._since is None:
                return
            try:
                self._do("load", self._load())
            except RankLost as lost:
                self._lost(lost, "load")

    def close(self) -> None:
        """End them, whatever they are doing; no process and no memory is left. May be called again, from any thread."""
        self._closing.set()
        self._group.close()

    def _begin(self) -> None:
        order, times = max(self._losses.items(), key=operator.itemgetter(1), default=(None, 0))
        # Starting them once more would end as it always has.
        if times > self._backoff.restarts:
            words = f"lost {times} times in the order {order!r}, which they never finished in between"
            if order is None:
                words = f"started {times} times and finished nothing"
            given_up = DeviceFull if _OUT_OF_MEMORY in self._why else MeshFailed
            raise given_up(f"ranks ({self._label}) were {words}; the last time {self._why}")
        if self._closing.wait(self._backoff.pause(times)):
            raise MeshFailed("the ranks have been stopped for good")
        began = time.monotonic()
        try:
            self._group.start()
            self._do("load", self._load())
        except RankLost as lost:
            self._lost(lost, None)
            # The device holds only the stage so far: another start would find as little memory.
            if _OUT_OF_MEMORY in lost.reason:
                raise DeviceFull(f"ranks ({self._label}) cannot start: {lost.reason}") from None
            return
        self._since = time.monotonic()
        started = {"mesh": self._label, "epoch": self._group.epoch, "pids": list(self._group.pids)}
        self._event("mesh_started", started | {"seconds": round(self._since - began, 3)})

    def _do(self, name: str, fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        answers = self._group.order(name, forgotten=forgotten, **fields)
        del self._losses[name]
        return answers

    def _lost(self, lost: RankLost, order: str | None) -> None:
        up_s = 0.0 if self._since is None else time.monotonic() - self._since
        self._losses[None] = 1 if up_s >= self._backoff.forget_s else self._losses[None] + 1
        if order is not None:
            self._losses[order] += 1
        if self._since is not None:  # ranks that were lost as they started held nothing yet
            self._since = None
            self._on_lost()
        self._why = lost.reason
        if not self._closing.is_set():  # ranks that we end ourselves are no event
            facts = {"rank": lost.rank, "reason": lost.reason, "epoch": self._group.epoch}
            self._event("rank_lost", facts | {"seconds": round(up_s, 3)})


_OUT_OF_MEMORY = "OutOfMemoryError"
"""In the last output of a rank with too little device memory: torch's name of the error."""
