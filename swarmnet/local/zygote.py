"""A process that has imported what its children need, and forks them: each starts in milliseconds, not seconds.

Run as a script by `starter.Preloaded`, which see for the packets on the control socket. It stays single-threaded and
opens nothing (a thread, or a gRPC channel, does not survive a fork), so what a fork becomes cannot tell that it was
not started afresh: `python -m MODULE ARGUMENTS...` with its own session, log and process id. A child dies with the
zygote, the zygote with the supervisor.
"""

from __future__ import annotations

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
from typing import Any

MAX_PACKET = 1 << 17
PR_SET_NAME = 15


def main() -> None:
    """`zygote.py CONTROL_FD SYS_PATH MODULES`, the latter two as JSON lists."""
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = json.loads(sys.argv[2])
    for module in json.loads(sys.argv[3]):
        with contextlib.suppress(ImportError):  # the child that needs it says so, in its own log
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in children leave the shared pages alone
    control.send(json.dumps({"threads": len(os.listdir("/proc/self/task"))}).encode())
    zygote = os.getpid()
    if (order := attend(control)) is not None:
        become(order, parent=zygote)


def attend(control: socket.socket) -> dict[str, Any] | None:
    """Fork, signal and reap until the control socket closes. In a forked child: returns its order at once."""
    children: dict[int, int] = {}  # pidfd -> pid, not reaped yet: the pid is still theirs
    with control, selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in children:
                    selector.unregister(key.fd)
                    pid = children.pop(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _say(control, {"ended": pid, "code": code})
                    continue
                packet = control.recv(MAX_PACKET)
                if not packet:
                    return None
                order: dict[str, Any] = json.loads(packet)
                if "signal" in order:
                    if order["pid"] in children.values():
                        os.kill(order["pid"], order["signal"])
                elif pid := os.fork():
                    handle = os.pidfd_open(pid)
                    children[handle] = pid
                    selector.register(handle, selectors.EVENT_READ)
                    _say(control, {"started": pid})
                else:
                    for handle in children:
                        os.close(handle)
                    return order


def _say(control: socket.socket, packet: dict[str, int]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the supervisor has gone, and so shall we in a moment
        control.send(json.dumps(packet).encode())


def become(order: dict[str, Any], *, parent: int) -> None:
    """Turn this fork into the process that was ordered, and run it to its end."""
    from swarmnet.net.leash import tie

    os.setsid()
    tie(parent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(PR_SET_NAME, order["name"].encode()[:15], 0, 0, 0)  # what ps and top call it
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
