"""The control socket of a running peer: `control.sock` in its directory, for the one who may read that.

A request is one line of JSON, and so is the answer: {"words", "facts"}, or {"error"}. `peer.control` decides; this
carries requests, does what was decided, writes limits into the peer config file, and keeps `paused` (a file that is
there during a pause) and contributed.json in the directory of the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet import telemetry
from swarmnet.clock import loop_time, run_loop, set_within, wall_time
from swarmnet.config import toml
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.net.identity import holder_of, write_whole
from swarmnet.peer.control import Control, WorkCount, WorkDone

if TYPE_CHECKING:
    from swarmnet.net.traffic import Traffic
    from swarmnet.peer.memory_fit import Capacity
    from swarmnet.peer.peer import Peer

log = telemetry.get(__name__)

SOCKET, PAUSED, CONTRIBUTED = "control.sock", "paused", "contributed.json"

LONGEST_LINE, ANSWER_S = 1 << 16, 60.0
"""Of a request or an answer; and how long a client waits, since a change may have to be planned."""

_LOOK_S, _KEEP_S = 1.0, 30.0
"""How often the hours are looked at, and how often the contribution is written: a crash loses no more of it."""

_MBIT = 125_000
_GIB = 1 << 30
_LONGEST_PATH = 100  # The system takes 107 bytes.


# ---------------------------------------------------------------- what is kept


def _kept(path: Path) -> WorkDone | None:
    """What was contributed so far; None if nothing was kept. Raises UsageError."""
    try:
        return WorkDone.parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be used ({error}): remove it") from error


def contributed(directory: Path) -> str:
    """In a line, what the peer of that directory had done when that was last written; "" if nothing was. Raises
    UsageError."""
    kept = _kept(directory / CONTRIBUTED)
    return "" if kept is None else kept.words(_day(kept))


# ---------------------------------------------------------------- the peer's end


class ControlSocket:
    """Answers the operator of one peer, from its first step on. capacity: plans what it can serve within changed
    limits. stop: set once the peer is asked to leave."""

    def __init__(self, config: PeerConfig, capacity: Capacity, traffic: Traffic, stop: asyncio.Event) -> None:
        self._dir, self._capacity, self._traffic, self._stop = config.dir, capacity, traffic, stop
        self._file = config.own_file
        self.tally = WorkCount(_kept(config.dir / CONTRIBUTED) or WorkDone(round(wall_time())))
        self._control = Control(config, self.tally, paused=(config.dir / PAUSED).exists())
        # An earlier version stored there what was set while the peer ran.
        if (earlier := config.dir / "wishes.json").exists():
            then = (
                "set limits and pauses once more (`swarmnet control limits`, `swarmnet control pause`), and delete it"
            )
            log.warning("not_read", path=str(earlier), reason="a file of an earlier version", then=then)
        self._holding: asyncio.Task[None] | None = None
        self._leaving = self._unkept = False
        self._counted_at = 0.0
        self._looked = asyncio.Event()
        self._busy = asyncio.Lock()

    @property
    def config(self) -> PeerConfig:
        """What the peer was started with and what was changed since."""
        return self._control.config

    async def run(self, peer: Peer) -> None:
        """Until cancelled."""
        self._apply_limits(peer, self.config, self._capacity.slots(self.config, self.config.stages))
        self._counted_at = loop_time()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._look(peer))
                await self._listen(peer)
        finally:
            self._count(peer)
            self._keep_work()

    def _count(self, peer: Peer) -> None:
        """Take in what the peer has done since the last time."""
        now, line = loop_time(), self._traffic
        serving = not peer.paused and any(replica.member.synced for replica in peer.replicas.values())
        # A machine that was suspended or stopped meanwhile has served no peer.
        passed_s = min(now - self._counted_at, _KEEP_S)
        self.tally.passed(passed_s, peer.state, line.up.total, line.down.total, serving=serving)
        self._counted_at = now

    async def _listen(self, peer: Peer) -> None:
        try:
            with _socket(self._dir / SOCKET) as bound:
                async with await asyncio.start_unix_server(
                    lambda reader, writer: self._serve(peer, reader, writer), sock=bound, limit=LONGEST_LINE
                ) as listener:
                    await listener.serve_forever()
        except OSError as error:
            # Not every file system has sockets.
            reason, then = error.strerror or str(error), "`swarmnet control` cannot reach this peer while it runs"
            log.warning("no_control", path=str(self._dir / SOCKET), reason=reason, then=then)

    async def resume(self) -> None:
        """End a pause, for the last time: the peer leaves, and says so itself from now on."""
        self._leaving = True
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.wait((self._holding,))

    async def _look(self, peer: Peer) -> None:
        """Pause and resume by the clock and as asked; count the time."""
        kept_at = loop_time()
        async with asyncio.TaskGroup() as group:
            while True:
                why = "" if self._leaving else self._control.pauses(_minute())
                if why and self._holding is None:
                    peer.say("pausing", {"why": why})
                    self._holding = group.create_task(peer.hold())
                elif not why and self._holding is not None:
                    self._holding.cancel()
                    self._holding = None
                    peer.say("resumed", {})
                self._looked.clear()
                await set_within(self._looked, _LOOK_S)
                self._count(peer)
                if loop_time() - kept_at >= _KEEP_S:
                    kept_at = loop_time()
                    self._keep_work()

    async def _serve(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                if not (line := await reader.readline()):
                    return
                async with self._busy:
                    answer = await self._answer(peer, line)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # it said nothing, too much, or left
        finally:
            writer.close()

    async def _answer(self, peer: Peer, line: bytes) -> dict[str, object]:
        control, before = self._control, (self._control.config, self._control.paused)
        control.links = peer.state.links
        self._count(peer)
        try:
            day = _day(self.tally.kept)
            reply = control.answer(json.loads(line), minute=_minute(), day=day, leaves=self._stop.is_set())
            if reply.change:
                slots, fits = await asyncio.to_thread(self._planned, control.config)
                self._keep(self._file, toml.changed(self._file, reply.change))
                self._apply_limits(peer, control.config, slots)
                self._capacity.fits = fits
                reply = replace(reply, words=f"{reply.words}; kept in {self._file}")
            if control.paused != before[1]:
                self._keep(self._dir / PAUSED, "" if control.paused else None)
        except BaseException as error:
            control.config, control.paused = before  # what cannot be is not kept, nor what took too long
            if isinstance(error, UsageError):
                return {"error": error.message}
            if isinstance(error, ValueError | RecursionError):
                return {"error": "a request is one line of JSON"}
            raise
        self._looked.set()
        tight = [stage for stage, replica in peer.replicas.items() if not replica.state.checkpoints.fits]
        if reply.change and tight:
            stages = ", ".join(map(str, tight))
            then = f"no checkpoint of stage {stages} fits in so little disk: none is written any more"
            reply = replace(reply, words=f"{reply.words}; {then}")
        if reply.leave:
            # The supervising process, if there is one, need not know: a peer that ends well is not started again.
            signal.raise_signal(signal.SIGTERM)
        return {"words": reply.words, "facts": dict(reply.facts)}

    def _planned(self, config: PeerConfig) -> tuple[int, Mapping[int, int] | None]:
        """How many slots a changed config comes to, and which stages fit within its limits if this peer may move.
        Raises UsageError."""
        slots = self._capacity.slots(config, config.stages)
        return slots, None if self._capacity.fits is None else self._capacity.stages(config)

    def _apply_limits(self, peer: Peer, config: PeerConfig, slots: int) -> None:
        caps = config.caps
        up, down = caps.upload_mbit * _MBIT, caps.download_mbit * _MBIT
        self._traffic.up.set_rate(up)
        self._traffic.down.set_rate(down)
        # The bandwidth that this peer announces to other replicas: the lower of both directions.
        line = int(min([rate for rate in (up, down) if rate], default=0))
        peer.limit(slots=slots, disk_bytes=int(caps.disk_gib * _GIB), line_bytes_per_s=line)

    def _keep_work(self) -> None:
        path = self._dir / CONTRIBUTED
        try:
            write_whole(path, json.dumps(asdict(self.tally.kept), indent=2) + "\n")
            self._unkept = False
        except OSError as error:
            # Said once: it is written again and again.
            if not self._unkept:
                log.warning("not_kept", path=str(path), reason=error.strerror or str(error))
            self._unkept = True

    def _keep(self, path: Path, text: str | None) -> None:
        """What was asked for outlives the process, or is refused. None: remove it. Raises UsageError."""
        try:
            if text is None:
                path.unlink(missing_ok=True)
            else:
                mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
                write_whole(path.resolve(), text, mode=mode, sync=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"nothing is changed: {path} cannot be written: {reason}") from error


def _day(done: WorkDone) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(done.since))


def _minute() -> int:
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min


@contextlib.contextmanager
def _socket(path: Path) -> Iterator[socket.socket]:
    """A listening socket for this user alone; the identity's lock on the directory excludes a second one."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as bound, _short(path) as name:
        before = os.umask(0o177)
        try:
            bound.bind(name)
        finally:
            os.umask(before)
        try:
            yield bound
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of `path` that the system takes for a socket's: deep directories have names that are too long."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


# ---------------------------------------------------------------- the operator's end


def ask_peer(directory: Path, ask: str, **more: object) -> dict[str, Any]:
    """What the peer of that directory answers: {"words", "facts"}. Raises UsageError, in words that say what to do."""
    if not directory.is_dir():
        raise UsageError(f"{directory}: no such directory; say with --dir where the peer keeps its identity")
    try:
        return run_loop(_ask(directory, {"ask": ask, **more}))
    except PeerNotRunning:
        # What it has done is on disk.
        if ask == "stats" and (kept := _kept(directory / CONTRIBUTED)):
            return {"words": kept.words(_day(kept)), "facts": asdict(kept)}
        raise


class PeerNotRunning(UsageError):
    """There is no peer to ask."""


async def _ask(directory: Path, request: dict[str, object]) -> dict[str, Any]:
    not_running = (
        f"no peer that serves a stage runs with --dir {directory}: start one with `swarmnet join LINK`, or name "
        "another with --dir"
    )
    try:
        async with asyncio.timeout(ANSWER_S):
            with _short(directory / SOCKET) as name:
                reader, writer = await asyncio.open_unix_connection(name, limit=LONGEST_LINE)
            with contextlib.closing(writer):
                writer.write(json.dumps(request).encode() + b"\n")
                answer = json.loads(await reader.readline())
    except PermissionError as error:
        raise UsageError(f"{directory / SOCKET}: that peer is another user's") from error
    except TimeoutError as error:
        raise UsageError(f"the peer with --dir {directory} does not answer: look at its log") from error
    except (OSError, ValueError) as error:
        if holder_of(directory):
            raise UsageError(
                f"the process with --dir {directory} does not listen: a peer that is starting does in a moment; a "
                "trainer or bootstrap node has no controls, and Ctrl+C ends it"
            ) from error
        raise PeerNotRunning(not_running) from error
    if "error" in answer:
        raise UsageError(answer["error"])
    found: dict[str, Any] = answer
    return found
