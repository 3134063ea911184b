"""What control groups leave to a process, read from files as they look in containers, and what is refused for it."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import socket
import tempfile
from pathlib import Path

import pytest

from swarmnet.cli.frame import run
from swarmnet.errors import UsageError
from swarmnet.host import GroupLimits, OomKills, available_memory, cores, group_limits
from swarmnet.net import dht_daemon
from swarmnet.net.dht_daemon import Daemon, Listen
from swarmnet.net.identity import Identity, own_directory
from swarmnet.wire import kernel_build

GIB = 1 << 30
V2_ROOT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
UNLIMITED = "9223372036854771712"  # as version 1 writes it


def machine(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    for path, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n", encoding="utf-8")
    return root


def test_the_group_above_that_leaves_least_counts(tmp_path: Path) -> None:
    pod, own = "sys/fs/cgroup/kube/pod 1", "sys/fs/cgroup/kube/pod 1/peer"
    files = {
        f"{pod}/memory.max": str(4 * GIB),
        f"{pod}/memory.current": str(3 * GIB),
        f"{pod}/memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file 7",
        f"{pod}/cpu.max": "150000 100000",
        f"{pod}/pids.max": "max",
        f"{own}/memory.max": str(2 * GIB),
        f"{own}/memory.current": str(GIB // 4),
        f"{own}/cpu.max": "max 100000",
        f"{own}/pids.max": "100",
        f"{own}/pids.current": "30",
        f"{own}/memory.events": "low 0\nmax 9\noom 4\noom_kill 3",
    }
    files["proc/meminfo"] = f"MemTotal: 9 kB\nMemAvailable: {20 * GIB // 1024} kB"
    root = machine(tmp_path, "0::/kube/pod 1/peer", V2_ROOT, files)
    assert group_limits(root) == GroupLimits(GIB + GIB // 2, 4 * GIB, 1.5, 70, 3)
    assert available_memory(root) == GIB + GIB // 2 and cores(root) == 1
    (root / own / "memory.high").write_text(str(GIB))  # from there on the kernel slows it down
    assert group_limits(root).memory == 3 * GIB // 4
    (root / "proc/meminfo").write_text("MemAvailable: 4 kB")
    assert available_memory(root) == 4096


@pytest.mark.parametrize(
    ("group", "top"),
    [("/docker/abc", "/docker/abc"), ("/", "/"), ("/docker/abc", "/"), ("/../other", "/")],
    ids=["host's path", "namespace", "path that is not mounted", "group outside the namespace"],
)
def test_version_1_in_a_container(tmp_path: Path, group: str, top: str) -> None:
    mounts = "\n".join(
        f"{number} 31 0:3{number} {top} /sys/fs/cgroup/{name} ro,relatime master:7 - cgroup cgroup rw,{name}"
        for number, name in enumerate(["memory", "cpu,cpuacct", "pids"], 32)
    )
    groups = f"9:pids:{group}\n4:memory:{group}\n1:cpu,cpuacct:{group}\n0::/"
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB // 2),
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}",
        "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/pids/pids.max": "64",
        "sys/fs/cgroup/pids/pids.current": "65",
    }
    root = machine(tmp_path, groups, mounts, files)
    kills = 0 if (group, top) == ("/docker/abc", "/") else 2  # it cannot be told which group is its own
    assert group_limits(root) == GroupLimits(3 * GIB // 4, GIB, 0.5, 0, kills) and cores(root) == 1


def test_a_limit_above_the_container_is_told_by_version_1(tmp_path: Path) -> None:
    mount = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
        "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {GIB}",
    }
    assert group_limits(machine(tmp_path, "4:memory:/", mount, files)).memory == GIB


@pytest.mark.parametrize(
    ("groups", "mounts"),
    [
        ("", ""),
        ("0::/", V2_ROOT),
        ("4:memory:/a\n0::/", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"),
        ("what is this", "and\nthis"),
    ],
    ids=["no proc", "no limits", "folder is away", "no such format"],
)
def test_without_limits_the_machine_is_what_there_is(tmp_path: Path, groups: str, mounts: str) -> None:
    root = machine(tmp_path, groups, mounts, {"proc/meminfo": "MemAvailable: 8 kB"})
    assert group_limits(root) == GroupLimits() and available_memory(root) == 8192
    assert cores(root) == len(os.sched_getaffinity(0))


def test_who_was_killed_for_memory() -> None:
    before = OomKills(2, 7, GIB)
    assert OomKills(2, 7, GIB).since(before) == ""
    assert OomKills(3, 8, GIB + GIB // 4).since(before) == "killed for memory, limit 1.25 GiB"
    assert OomKills(3, 8, None).since(before) == "killed for memory"
    assert OomKills(2, 8, GIB).since(before) == "probably killed for memory: the machine had none left"


def start(*announce: str) -> None:
    asyncio.run(Daemon.start(Identity.generate(), Listen(announce=announce)))


def test_too_few_threads_for_the_daemon_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_daemon, "tasks_left", lambda: 23)
    with pytest.raises(UsageError, match="only 23 more processes and threads may start here"):
        start()


@pytest.mark.parametrize("family", ["dns4", "dns6"])
def test_an_announced_name_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    def answer(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    with pytest.raises(UsageError, match=f"--announce /{family}/nosuch.invalid/tcp/1: there is no such host"):
        start(f"/{family}/nosuch.invalid/tcp/1")


@pytest.mark.parametrize("place", ["/proc/nothing", "/proc/" + 64 * "x"], ids=["away", "too long"])
def test_no_directory_for_temporary_files_is_one_line(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", place)
    if len(place) >= 64:
        monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: Path("/proc/nothing/x").mkdir())
    with pytest.raises(UsageError, match="no directory for temporary files"):
        own_directory("x")


def test_a_user_without_a_home_needs_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # an earlier test's, whose stream is closed
    monkeypatch.setattr(logging.getLogger("swarmnet"), "handlers", [logging.NullHandler()])
    monkeypatch.setattr(kernel_build, "compiler", lambda: "/usr/bin/false")
    kernel_build.prepare(threads=1).join()  # a traceback of a thread fails a test
    for words, line in (
        (["plan", "~/run.toml"], "~ names no directory"),
        (["plan", "nothere.toml"], "nothere.toml: "),
        (["peer", "--no-restart"], "~/.swarmnet/peer: ~ names no home"),
        (["peer", "--no-restart", "--dir", "nothere"], "needs the run's manifest"),
    ):
        assert run(words) == 2
        said = capsys.readouterr().err
        assert line in said and said.count("\n") == 1
