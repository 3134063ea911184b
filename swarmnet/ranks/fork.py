"""The fork server: a process that has imported what its children need, and forks them in milliseconds.

Run as a script by `ranks.launcher.Launcher`, which describes the packets on the control socket. The fork server stays
single-threaded and opens nothing, because neither a thread nor a CUDA context nor a gRPC channel survives a fork. If
the imports leave a thread behind, or if the command is no module, the child execs a fresh interpreter.

Three rules hold for every child. The fork server ends when its parent has ended or has closed the control socket. The
child ends with the fork server. The processes that the child has started, in its process group, end with the child.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from typing import NoReturn

from swarmnet.net.parent_death import tie
from swarmnet.ranks.channel import ChannelClosed, ChildChannel, Packet, packed

PR_SET_NAME = 15  # of prctl, from linux/prctl.h


def main() -> None:
    """`fork.py PARENT_PID CONTROL_FD MODULES`, the last as a JSON list."""
    parent = os.pidfd_open(os.getppid())
    if os.getppid() != int(sys.argv[1]):  # it died before we could watch it
        os._exit(0)
    control = ChildChannel(socket.socket(fileno=int(sys.argv[2])))
    hang_up = signal.getsignal(signal.SIGHUP)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # our parent decides when we end
        signal.signal(number, signal.SIG_IGN)
    for module in json.loads(sys.argv[3]):
        with contextlib.suppress(Exception):  # the child that needs it fails by it, and says so
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in children leave the shared pages alone
    threads = len(os.listdir("/proc/self/task"))
    control.send(packed({"threads": threads}))
    server = os.getpid()
    order, descriptors = serve(control, parent)
    tie(server)
    os.setsid()
    if order["output"] is not None:
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    signal.signal(signal.SIGHUP, hang_up)  # `nohup` has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    words = [*order["words"], *map(str, descriptors)]
    # Only the thread that forks lives on in a fork: locks of the others would stay taken.
    if threads > 1 or words[0] != "-m":
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        os.execv(sys.executable, [sys.executable, "-P", *words])
    ctypes.CDLL(None).prctl(PR_SET_NAME, order["name"].encode()[:15], 0, 0, 0)  # what ps and top call it
    sys.argv = words[1:]
    leave(run(words[1]))


def serve(control: ChildChannel, parent: int) -> tuple[Packet, list[int]]:
    """Fork and reap until the parent has gone, then exit. In a forked child: returns its order and descriptors.

    parent: a pidfd.
    """
    children: dict[int, int] = {}  # pidfd -> pid, not reaped yet: the pid is still theirs
    with contextlib.closing(control), selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(parent, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in children:
                    selector.unregister(key.fd)
                    control.send(packed({"ended": children[key.fd], "code": _reaped(children.pop(key.fd))}))
                    os.close(key.fd)
                    continue
                try:
                    if key.fd == parent:
                        raise ChannelClosed
                    order, descriptors = control.receive()
                except ChannelClosed:
                    for pid in children.values():
                        _kill_group(pid)
                    os._exit(0)
                # The fork server goes on; the child returns to `main`, and becomes what was ordered.
                if pid := os.fork():
                    handle = os.pidfd_open(pid)
                    children[handle] = pid
                    selector.register(handle, selectors.EVENT_READ)
                    control.send(packed({"started": pid}), handle)
                    for descriptor in descriptors:
                        os.close(descriptor)
                else:
                    for handle in (parent, *children):
                        os.close(handle)
                    return order, descriptors


def _reaped(pid: int) -> int:
    """The exit code of a child that has ended. What it started and left running ends here."""
    _kill_group(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _kill_group(pid: int) -> None:
    """End a child and what it has started. It is not reaped yet: the pid is still its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # its process group is empty
        os.killpg(pid, signal.SIGKILL)


def run(module: str) -> int:
    """What `python -m MODULE` would exit with. Raises KeyboardInterrupt."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End as an interpreter does, up to where it takes every module apart: that would copy all pages that are shared.

    It took 0.25 s of computing, where the rest takes 0.04 s. The forks of multiprocessing leave like this, too.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it is closed, or its reader has gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
