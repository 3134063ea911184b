"""Compiles kernels.cpp once per machine, in the background, and lets the codecs use what has the reference's bits.

The library rests in the user's cache, under a hash of all that it depends on: source, flags, compiler, processor. Who
else could write there could run code here, so only a folder and a file of this user alone are taken. An empty file
stands for a library with other bits than the reference's. There, and without a compiler, the reference is used.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

from swarmnet import telemetry
from swarmnet.wire import kernels

log = telemetry.get(__name__)

COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread"),
    "-ffp-contract=off",  # a fused multiply-add rounds once where the reference rounds twice
    *("-fno-math-errno", "-fno-trapping-math"),  # roots in vectors; no bit depends on it
)
_SOURCE = Path(__file__).with_name("kernels.cpp")
_NICE = ("nice", "-n", "19")
_COMPILE_S = 300.0


def compiler() -> str | None:
    """The first C++ compiler of this system."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def prepare(*, threads: int) -> threading.Thread:
    """Have the kernels compiled, checked and used from then on, by a thread that needs no waiting for.

    threads: that a call of a kernel may take.
    """
    thread = threading.Thread(target=_prepare, args=(threads,), name="kernels", daemon=True)
    thread.start()
    return thread


def _prepare(threads: int) -> None:
    if (found := compiler()) is None:
        log.debug("no_compiler", wanted=" or ".join(COMPILERS))
        return
    try:
        place = built(found, cache())
        if place.stat().st_size:
            kernels.use(kernels.load(str(place), threads=threads))
    # A compiler that does not work is as good as none, and so is a user without a home for the cache (RuntimeError).
    except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("no_kernels", error=str(error)[:200])


def cache() -> Path:
    """The cache of this user. Raises PermissionError if another user can write there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarmnet" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_mine(folder)
    return folder


def built(compiler: str, folder: Path) -> Path:
    """The library in that folder, compiled and checked unless it is there. Raises OSError, SubprocessError."""
    from swarmnet.wire import kernel_check

    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_S).stdout
    parts = _SOURCE.read_bytes(), kernel_check.DIGEST.encode(), " ".join(FLAGS).encode(), version, _processor()
    place = folder / f"{hashlib.sha256(b''.join(hashlib.sha256(part).digest() for part in parts)).hexdigest()}.so"
    # Of all peers that start on this machine one compiles, and the rest wait for it.
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob("tmp*"):  # by a process that was killed, or it would hold the lock
            shutil.rmtree(left, ignore_errors=True)
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / place.name
                command = [*_NICE, compiler, *FLAGS, str(_SOURCE), "-o", str(made)]
                _run(command)
                if kernel_check.digest(kernels.load(str(made), threads=1)) != kernel_check.DIGEST:
                    log.warning("kernels_differ", compiler=compiler)
                    made.unlink()  # not emptied: its code is mapped into memory
                    made.touch()
                made.chmod(0o700)
                made.replace(place)
    _check_mine(place)
    return place


def _run(command: list[str]) -> None:
    """Compile, and leave no process behind: a compiler starts others, which would outlive it and this peer."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    end = atexit.register(functools.partial(_end, process.pid))
    try:
        if code := process.wait(_COMPILE_S):
            raise subprocess.CalledProcessError(code, command)
    finally:
        end()
        atexit.unregister(end)
        process.wait()


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _check_mine(path: Path) -> None:
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not this user's alone: chmod -R go= it, or remove it")


def _processor() -> bytes:
    """What -march=native depends on: homes are shared among machines."""
    lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].splitlines() if os.path.exists("/proc/cpuinfo") else []
    kept = [line for line in lines if line.startswith((b"model", b"vendor", b"cpu family", b"flags", b"Features"))]
    return b"\n".join([platform.machine().encode(), *kept])
