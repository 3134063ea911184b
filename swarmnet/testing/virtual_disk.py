"""A peer's disk on virtual time: what was written is there when the process comes back. No files, no threads."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection

from swarmnet.errors import BadCheckpoint
from swarmnet.ids import RunId
from swarmnet.messages import StateHeader
from swarmnet.state.disk import CheckpointInfo, Found, RunMemory, Written


class SimulatedDisk:
    """A `state.disk.Disk`. open_s, write_s: seconds of reading all that is there, and of one write. full: writes
    fail. A process that dies while it writes leaves nothing behind."""

    def __init__(self, run: RunId, *, open_s: float = 0.05, write_s: float = 0.01) -> None:
        self.open_s, self.write_s, self.full = open_s, write_s, False
        self.files: dict[tuple[int, int], tuple[CheckpointInfo, bytes]] = {}
        self.memories: dict[int, RunMemory] = {}
        self._run = run

    def path(self, stage: int, version: int) -> str:
        return f"simulated/stage-{stage}-step-{version}"

    def spoil(self, stage: int, version: int) -> None:
        """Flip a bit of a checkpoint."""
        info, data = self.files[stage, version]
        self.files[stage, version] = info, bytes([data[0] ^ 1]) + data[1:]

    async def open(self, stage: int) -> Found:
        await asyncio.sleep(self.open_s)
        good: list[CheckpointInfo] = []
        bad: list[BadCheckpoint] = []
        for held, version in sorted(self.files):
            if held == stage:
                try:
                    good.append(self._read(stage, version)[0])
                except BadCheckpoint as error:
                    bad.append(error)
        return Found(tuple(good), tuple(bad), self.memories.get(stage, RunMemory()))

    async def write(self, stage: int, header: StateHeader, data: bytes | memoryview) -> Written:
        info = CheckpointInfo.of(self._run, stage, header, data)
        # Only after the wait: a process that dies meanwhile has written nothing.
        await asyncio.sleep(self.write_s)
        if self.full:
            return Written(info, "No space left on device")
        self.files[stage, header.version] = info, bytes(data)
        return Written(info)

    async def retain(self, stage: int, versions: Collection[int]) -> str | None:
        self.files = {
            (held, version): file
            for (held, version), file in self.files.items()
            if held != stage or version in versions
        }
        return None

    async def remember(self, stage: int, memory: RunMemory) -> None:
        self.memories[stage] = memory

    async def load(self, stage: int, version: int) -> tuple[CheckpointInfo, memoryview]:
        info, data = self._read(stage, version)
        return info, memoryview(data)

    def _read(self, stage: int, version: int) -> tuple[CheckpointInfo, bytes]:
        path = self.path(stage, version)
        if (stage, version) not in self.files:
            raise BadCheckpoint(path, "missing")
        info, data = self.files[stage, version]
        if hashlib.sha256(data).hexdigest() != info.sha256:
            raise BadCheckpoint(path, "altered")
        return info, data
