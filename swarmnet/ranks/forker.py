"""A process that has loaded what its children need, and forks them: a child is there in milliseconds, not seconds.

Run as a script by `ranks.starter.ForkStarter`, which describes the packets on the control socket. The forker stays
single-threaded and opens nothing: neither a thread nor a CUDA context nor a gRPC channel survives a fork. So a child
cannot tell that it was not started by `python -m MODULE ARGUMENTS...`: it has its own session, log and process id.

Three rules hold for every child. The forker ends when the process that started it has ended, however, or has closed the
control socket. The child ends with the forker. What the child has started, in its process group, ends with the child.
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
from typing import Any, NoReturn

MAX_PACKET = 1 << 17
PR_SET_NAME = 15  # of prctl, from linux/prctl.h


def main() -> None:
    """`forker.py PARENT_PID CONTROL_FD MODULES`, the last as a JSON list."""
    parent = os.pidfd_open(os.getppid())
    if os.getppid() != int(sys.argv[1]):  # it died before we could watch it
        os._exit(0)
    control = socket.socket(fileno=int(sys.argv[2]))
    hang_up = signal.getsignal(signal.SIGHUP)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # our parent decides when we end
        signal.signal(number, signal.SIG_IGN)
    for module in json.loads(sys.argv[3]):
        with contextlib.suppress(Exception):  # the child that needs it fails by it, and says so
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in children leave the shared pages alone
    _say(control, {"threads": len(os.listdir("/proc/self/task"))})
    forker = os.getpid()
    if (forked := attend(control, parent)) is None:
        os._exit(0)
    signal.signal(signal.SIGHUP, hang_up)  # `nohup` has it ignored
    become(*forked, parent=forker)


def attend(control: socket.socket, parent: int) -> tuple[dict[str, Any], list[int]] | None:
    """Fork and reap until the parent has gone. In a forked child: returns its order and descriptors at once.

    parent: a pidfd.
    """
    children: dict[int, int] = {}  # pidfd -> pid, not reaped yet: the pid is still theirs
    with control, selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(parent, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == parent:
                    return None
                if key.fd in children:
                    selector.unregister(key.fd)
                    _say(control, {"ended": children[key.fd], "code": _reaped(children.pop(key.fd))})
                    os.close(key.fd)
                    continue
                try:
                    packet, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET, 1)
                except ConnectionResetError:  # the parent died before it had read all that we said
                    return None
                if not packet:
                    return None
                # The forker goes on; the child returns to `main`, and becomes what was ordered.
                if pid := os.fork():
                    handle = os.pidfd_open(pid)
                    children[handle] = pid
                    selector.register(handle, selectors.EVENT_READ)
                    _say(control, {"started": pid}, handle)
                    for descriptor in descriptors:
                        os.close(descriptor)
                else:
                    for handle in (parent, *children):
                        os.close(handle)
                    return json.loads(packet), descriptors


def _reaped(pid: int) -> int:
    """The exit code of a child that has ended. What it started and left running ends here: the pid is still its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in its process group
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _say(control: socket.socket, packet: dict[str, int], *descriptors: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has gone: `attend` will notice
        socket.send_fds(control, [json.dumps(packet).encode()], descriptors)


def become(order: dict[str, Any], descriptors: list[int], *, parent: int) -> None:
    """Turn this fork into the process that was ordered, and run it to its end. parent: the forker's process id."""
    from swarmnet.net.parent_death import tie

    os.setsid()
    tie(parent)
    if order["output"] is not None:
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    for descriptor in descriptors:  # not to be inherited by what the child starts
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_NAME, order["name"].encode()[:15], 0, 0, 0)  # what ps and top call it
    sys.argv = [order["module"], *order["arguments"], *map(str, descriptors)]
    leave(run(order["module"]))


def run(module: str) -> int:
    """What `python -m MODULE` would exit with. Raises KeyboardInterrupt."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        raise
    except BaseException:
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
        with contextlib.suppress(OSError, ValueError):  # it is closed, or nobody reads it
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
