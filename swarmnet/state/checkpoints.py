"""A replica's checkpoints: at which versions one is written, how it is written while training goes on, which ones stay.

What counts when the run goes back is the newest version that *every* stage has on some disk. So all stages aim at the
same versions, multiples of `training.checkpoint_every`. A disk too slow for each of them takes every second, fourth,
..., which are among those of the faster ones. No peer deletes a version that is, or may
still become, the newest common one.

The copy is taken between two steps; hashing and writing happen on a thread, one checkpoint at a time. A disk that is
slower than training is given fewer checkpoints, never a queue; one that is full or broken costs a warning and the
checkpoint, never the step. Knows when the state moves by being told (`reached`), and no peers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Set

from swarmnet.clock import loop_time
from swarmnet.errors import BadCheckpoint
from swarmnet.ids import NO_RESTART, OnDisk, PeerId, Restart
from swarmnet.manifest.extension import Notice
from swarmnet.messages import StateHeader
from swarmnet.stage.interfaces import Compute
from swarmnet.state.disk import CheckpointInfo, Disk, RunMemory, Written
from swarmnet.state.rollback import MAX_VOTERS, abandoned
from swarmnet.state.snapshot_source import consistent_copy
from swarmnet.telemetry.kinds import OnEvent


class CheckpointSchedule:
    """When one replica's checkpoints are due. every: steps between them, 0 for none. last: the run's last version."""

    def __init__(self, *, every: int, last: int) -> None:
        self.every, self.last = every, last
        self.stride = 1

    def due(self, version: int) -> bool:
        """Is this version to be written?"""
        # The end of the run is written whatever the disk takes.
        if version == self.last:
            return True
        return version > 0 and self.every > 0 and version % (self.every * self.stride) == 0

    def took(self, num_steps: int) -> None:
        """The write that has just ended began so many steps ago: thin out until one is over before the next is due."""
        self.stride = 1
        while 0 < self.every * self.stride < num_steps:
            self.stride *= 2


def roundness(version: int, every: int) -> int:
    """How often a multiple of `every` can be halved and stay one; -1 if it is none."""
    # Such a version no schedule aims at.
    if every <= 0 or version <= 0 or version % every:
        return -1
    multiple = version // every
    return (multiple & -multiple).bit_length() - 1


def retained(versions: Iterable[int], *, keep: int, every: int, common: int | None) -> frozenset[int]:
    """Which of the checkpoints to keep: `keep` of them, the newest first, but never without these three:

    the newest; the newest common one (common: the newest version that every stage is known to have on some disk); and
    of those in between the roundest, which is the one that a slower stage is about to have as well.
    """
    newest_first = sorted(set(versions), reverse=True)
    kept = newest_first[:1]
    if common in newest_first[1:]:
        kept += [version for version in newest_first if version == common]
    # A slower stage writes the rounder ones of these: the next common version is among them.
    between = [version for version in newest_first[1:] if version > (common or 0)]
    if between:
        kept.append(max(between, key=lambda version: (roundness(version, every), version)))
    kept += [version for version in newest_first if version not in kept][: max(keep - len(kept), 0)]
    return frozenset(kept)


class Checkpointer:
    """The checkpoints of one (peer, stage). `open` first; then `run` for as long as the replica lives.

    Args:
        where: tells where the replica stands, None while it has no state of its own or is applying.
        keep: how many checkpoints stay on disk.
        common: tells the newest version that every stage is known to have on some disk.
        voters: tells which peers have contributed to commits, the latest last.
        check_notices: raises ValueError unless the run's owner has signed these.
    """

    def __init__(
        self,
        stage: int,
        engine: Compute,
        where: Callable[[], StateHeader | None],
        disk: Disk,
        schedule: CheckpointSchedule,
        *,
        keep: int,
        on_event: OnEvent,
        common: Callable[[], int | None] = lambda: None,
        voters: Callable[[], Iterable[PeerId]] = tuple,
        check_notices: Callable[[tuple[Notice, ...]], object] = lambda notices: None,
    ) -> None:
        self._stage, self._engine, self._where, self._disk = stage, engine, where, disk
        self._keep = keep
        self._on_event, self._common_now, self._voters_now = on_event, common, voters
        self._check_notices = check_notices
        self._schedule = schedule
        self._held: dict[int, CheckpointInfo] = {}
        self._restarts: set[Restart] = set()
        self._common: int | None = None
        self._tried: StateHeader | None = None
        self._prepared: StateHeader | None = None
        self.memory = RunMemory()
        """What this peer's disk remembers of the run."""
        self.most_bytes = 0
        """What they may take on disk, the one under way included; 0: no limit."""
        self.spared = -1
        """Versions up to this one stay on disk for now: the run may be about to go back to one of them."""
        self.all_damaged = False
        """Were there checkpoints, and not one that is sound?"""
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    @property
    def fits(self) -> bool:
        """Does the newest on disk keep to `most_bytes`? True while there is none."""
        newest = self._held[max(self._held)].num_bytes if self._held else 0
        return not self.most_bytes or newest <= self.most_bytes

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions to announce: on disk, verified, and not given up by a restart; oldest first."""
        return tuple(kept.version for kept in self.on_disk)

    @property
    def on_disk(self) -> tuple[OnDisk, ...]:
        """`versions`, each with the restart it descends from."""
        known, last = self._restarts, self.restart.number
        kept = (self._held[version].on_disk for version in sorted(self._held))
        return tuple(at for at in kept if at.restart.number <= last and not abandoned(at.version, at.restart, known))

    @property
    def restart(self) -> Restart:
        """The highest restart known here: after a crash of all peers, what the disk remembers of it."""
        return max(self._restarts, default=NO_RESTART)

    def path(self, version: int) -> str:
        """The path of the checkpoint of a version, to show to people."""
        return self._disk.path(self._stage, version)

    async def open(self) -> tuple[int, ...]:
        """Read through what an earlier process has left; what is bad is named and not used. Returns `versions`."""
        found = await self._disk.open(self._stage)
        self.memory = found.memory
        self.all_damaged = bool(found.bad) and not found.good
        # What was written while the disk was read is newer than what was found.
        self._held = {info.version: info for info in found.good} | self._held
        for error in found.bad:
            self._say_bad(error)
        self._restarts |= {info.on_disk.restart for info in found.good}
        return self.versions

    def stand_under(self, restart: Restart) -> None:
        """The replica goes on under this restart: checkpoints after its version are of a past that was given up."""
        # A later one that only the disk remembers was never decided, or was taken back.
        self._restarts = {known for known in self._restarts if known.number <= restart.number}
        if restart != NO_RESTART and restart not in self._restarts:
            self._restarts.add(restart)
            # Common versions after the restart are of that past, too.
            if self._common is not None:
                self._common = min(self._common, restart.version)

    async def remember(self, restart: Restart) -> None:
        """Put on disk that the run goes on under `restart`, and who decides about the next one."""
        voters = tuple(self._voters_now())[-MAX_VOTERS:] or self.memory.voters
        memory = RunMemory(restart=max(restart.number, self.memory.restart), voters=voters)
        if memory != self.memory:
            self.memory = memory
            await self._disk.remember(self._stage, memory)

    def ends_at(self, version: int) -> None:
        """This is the run's last version, as far as is decided: it is written in any case."""
        self._schedule.last = version

    def reached(self) -> None:
        """The replica has come to stand elsewhere: wake `run` if that is worth a checkpoint."""
        header = self._where()
        if header is not None and (self._is_due(header) or self._is_next(header)):
            self._wake.set()

    async def run(self) -> None:
        """Write what is due, one after the other. A version that passes while another is written is skipped."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            # One checkpoint at a time, also with `write_now`.
            async with self._writing:
                header = self._where()
                # Memory takes seconds to have: a step earlier it delays no step.
                if header is not None and self._is_next(header):
                    self._prepared = header
                    await self._engine.prepare_snapshot()
                elif header is not None and self._is_due(header):
                    self._tried = header
                    await self._copy_and_write(attempts=1)
                    # A disk that needed several steps is asked less often from now on.
                    if (now := self._where()) is not None:
                        self._schedule.took(now.version - header.version)
            self.reached()

    async def write_now(self) -> Written | None:
        """Write the state as it stands, unless that is on disk already: at the end, and when leaving.

        Waits for a write that is under way. None if the replica has no state of its own.
        """
        async with self._writing:
            header = self._where()
            # It is there already, of the same lineage.
            if header is not None and (info := self._held.get(header.version)) is not None and info.header == header:
                return Written(info)
            return await self._copy_and_write()

    async def load(self, version: int) -> tuple[StateHeader, memoryview] | None:
        """Read a checkpoint, verified. None: it cannot be used, which is said, and it is announced no more."""
        try:
            info, data = await self._disk.load(self._stage, version)
            self._check_notices(info.header.notices)
        except (BadCheckpoint, ValueError) as error:
            bad = error if isinstance(error, BadCheckpoint) else BadCheckpoint(self.path(version), str(error))
            self.forget(version, bad)
            return None
        return info.header, data

    def forget(self, version: int, error: BadCheckpoint) -> None:
        """A checkpoint has turned out to be unusable: use an older one."""
        self._held.pop(version, None)
        self._say_bad(error)

    # ------------------------------------------------------------ inside

    def _is_due(self, header: StateHeader | None) -> bool:
        """At most once per due checkpoint: a failed write is retried at the next one, not immediately."""
        if header is None or header == self._tried or not self._schedule.due(header.version):
            return False
        info = self._held.get(header.version)
        return info is None or info.header != header

    def _is_next(self, header: StateHeader) -> bool:
        """Will the next version be due? Then its memory can be had before training could have to wait for it."""
        return header != self._prepared and not self._is_due(header) and self._schedule.due(header.version + 1)

    async def _copy_and_write(self, *, attempts: int = 3) -> Written | None:
        copy = await consistent_copy(self._engine, self._where, attempts=attempts)
        # The state moved on during each attempt, or there is none.
        if copy is None:
            return None
        header, data = copy
        began, path = loop_time(), self.path(header.version)
        fitting = self._fitting(header.version, len(data))
        if fitting is None:
            reason = f"it and what must be kept are more than the {self.most_bytes:,} bytes of caps.disk_gib"
            then = "training goes on without it: offer more (`swarmnet control limits --disk`), or other peers keep it"
            self._say_failed(header.version, reason, len(data), then)
            return None
        if fitting != self._held.keys():
            await self._retain(fitting)
        written = await self._disk.write(self._stage, header, data)
        # Training goes on without this one; what the others hold is untouched.
        if written.problem is not None:
            self._held.pop(header.version, None)
            then = "training goes on; the next checkpoint is tried again"
            self._say_failed(header.version, written.problem, len(data), then)
            return written
        self._held[header.version] = written.info
        await self.remember(header.restart)
        problem = await self._retain(self._to_keep(header.version, self._keep))  # by what the others have by now
        done = {"version": header.version, "path": path, "bytes": written.info.num_bytes}
        done |= {"seconds": round(loop_time() - began, 3)} | ({"problem": problem} if problem else {})
        self._on_event("checkpoint", done)
        return written

    async def _retain(self, keep: Set[int]) -> str | None:
        """Delete all but these. Returns what went wrong, in words."""
        self._held = {version: info for version, info in self._held.items() if version in keep}
        return await self._disk.retain(self._stage, frozenset(keep))

    def _fitting(self, version: int, num_bytes: int) -> Set[int] | None:
        """Which of those held stay, so that one more keeps to `most_bytes`; None: it would not even so."""
        if not self.most_bytes:
            return self._held.keys()
        must, taken = self._to_keep(version, 1), {each: info.num_bytes for each, info in self._held.items()}
        for oldest in sorted(taken.keys() - must):
            if sum(taken.values()) + num_bytes > self.most_bytes:
                del taken[oldest]
        # No checkpoint is deleted unless that makes enough space.
        return taken.keys() if sum(taken.values()) + num_bytes <= self.most_bytes else None

    def _to_keep(self, newest: int, most: int) -> frozenset[int]:
        """Which of those held are kept once `newest` is on disk."""
        found = self._common_now()
        if found is not None:
            self._common = max(found, self._common or 0)  # a record that expires does not undo what was seen
        candidates = {*self.versions, newest}
        keep = retained(candidates, keep=most, every=self._schedule.every, common=self._common)
        keep |= {version for version in self._held if version <= self.spared}
        # Until the restart has led to a step, it may be taken back.
        return keep if newest > self.restart.version else keep | self._held.keys()

    def _say_failed(self, version: int, reason: str, num_bytes: int, then: str) -> None:
        fields = {"version": version, "path": self.path(version), "reason": reason, "bytes_needed": num_bytes}
        self._on_event("checkpoint_failed", fields | {"then": then})

    def _say_bad(self, error: BadCheckpoint) -> None:
        newest = (
            f"the newest one here that is sound is step {max(self._held)}" if self._held else "no other one is here"
        )
        then = f"it is not used; {newest}"
        self._on_event("checkpoint_bad", {"path": error.path, "reason": error.reason, "then": then})
