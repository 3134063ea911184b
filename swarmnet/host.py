"""What this process may take of its machine: memory, processors, processes. In a container that is less than there is.

Control groups are read in both versions. A limit of any group above counts, not only that of the process's own group.
A file that cannot be read is no limit.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 for "no limit"
_MOUNT = re.compile(r"\S+ \S+ \S+ (\S+) (\S+) .*?- (cgroup2?) \S+ (\S+)")


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What control groups leave to this process. None: no group limits it."""

    memory: int | None = None
    """Bytes that may still be taken: limit - (usage - file cache that the kernel drops first)."""
    memory_limit: int | None = None
    """Bytes: the limit that leaves the least."""
    cpus: float | None = None
    """Processors' worth of time."""
    tasks: int | None = None
    """Processes and threads that may still be started."""
    oom_kills: int = 0
    """Processes of this process's own group that the kernel has killed for memory."""


def group_limits(root: Path = _ROOT) -> GroupLimits:
    """Read the limits of all groups that this process is in. root: where the machine's files are."""
    rooms: list[tuple[int, int]] = []
    cpus: list[float] = []
    tasks: list[int] = []
    kills = 0
    for own, folder in _folders(root):
        stat = _table(folder / "memory.stat")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        # Counted as used, and given up by the kernel before it kills: as Kubernetes counts a working set.
        used = max(used - stat.get("total_inactive_file", stat.get("inactive_file", 0)), 0)
        limits = [_number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        # Groups above the container cannot be seen from inside; version 1 tells their limit here.
        limits.append(stat.get("hierarchical_memory_limit"))
        rooms += [(max(limit - used, 0), limit) for limit in limits if limit is not None and limit < _UNLIMITED]
        quota, period = _quota(folder)
        if quota and period:
            cpus.append(quota / period)
        if (most := _number(folder / "pids.max")) is not None:
            tasks.append(max(most - (_number(folder / "pids.current") or 0), 0))
        if own:
            events = _table(folder / "memory.events") or _table(folder / "memory.oom_control")
            kills = max(kills, events.get("oom_kill", 0))
    room, limit = min(rooms, default=(None, None))
    return GroupLimits(room, limit, min(cpus, default=None), min(tasks, default=None), kills)


def available_memory(root: Path = _ROOT) -> int | None:
    """Bytes that this process may still take: of the machine's memory, within its control groups. None: unknown."""
    here = _table(root / "proc/meminfo").get("MemAvailable:")
    free = None if here is None else here * 1024
    if free is None and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min((found for found in (free, group_limits(root).memory) if found is not None), default=None)


def cores(root: Path = _ROOT) -> int:
    """Processors that this process may use at once; a quota of less than one is one."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = group_limits(root).cpus
    return here if quota is None else max(min(here, math.floor(quota)), 1)


def tasks_left(root: Path = _ROOT) -> int | None:
    """Processes and threads that this process may still start, within its control groups. None: no group limits it."""
    return group_limits(root).tasks


# ---------------------------------------------------------------- killed for memory


@dataclass(frozen=True, slots=True)
class OomKills:
    """How often the kernel has killed for memory: in this process's control group, and on the machine."""

    group: int
    machine: int
    limit: int | None
    """Bytes: the group's memory limit, if there is one."""

    @classmethod
    def read(cls, root: Path = _ROOT) -> OomKills:
        """As it stands now."""
        found = group_limits(root)
        return cls(found.oom_kills, _table(root / "proc/vmstat").get("oom_kill", 0), found.memory_limit)

    def since(self, before: OomKills) -> str:
        """Why a child that SIGKILL has ended since `before` was killed, in words; "": not for memory."""
        if self.group > before.group:
            limit = "" if self.limit is None else f", limit {self.limit / 2**30:.2f} GiB"
            return f"killed for memory{limit}"
        # It counts all of the machine's groups, so this may have been another process.
        return "probably killed for memory: the machine had none left" if self.machine > before.machine else ""


# ---------------------------------------------------------------- files


def _folders(root: Path) -> Iterator[tuple[bool, Path]]:
    """(is it the process's own, folder) of its groups and of all groups above that can be seen from here."""
    member = dict[str, str]()
    for line in _lines(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        member |= dict.fromkeys(controllers.split(","), path)
    for found in filter(None, map(_MOUNT.fullmatch, _lines(root / "proc/self/mountinfo"))):
        top, at, kind, options = map(_unescaped, found.groups())
        path = next((member[name] for name in options.split(",") if name in member), "")
        path = member.get("", "") if kind == "cgroup2" else path
        if not path:
            continue
        mounted = root / at.lstrip("/")
        inside = path == top or path.startswith(top.rstrip("/") + "/")
        # A container sees its own group at the mount point, under a path of the host's.
        folder = mounted / path[len(top) :].lstrip("/") if inside and ".." not in path.split("/") else mounted
        yield True, folder
        while folder != mounted:
            folder = folder.parent
            yield False, folder


def _quota(folder: Path) -> tuple[int | None, int | None]:
    """Microseconds of CPU time, and in how many; None: no limit."""
    if found := next(iter(_lines(folder / "cpu.max")), "").split():
        return _decimal(found[0]), _decimal(found[-1])
    return _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _table(path: Path) -> dict[str, int]:
    """Of lines that are a name and a number."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _number(path: Path) -> int | None:
    """None: there is none, or it says "max" or -1."""
    return _decimal("".join(_lines(path)))


def _decimal(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _unescaped(text: str) -> str:
    """Of mountinfo, where a blank is \\040."""
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), text)
