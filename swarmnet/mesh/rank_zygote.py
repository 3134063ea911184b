"""A process that has imported what ranks need, and forks them: a rank is there in milliseconds, not seconds.

Run as a script by `rank_starter.ForkedRanks`, which describes the packets on the control socket. It stays single-
threaded and never touches a device (neither threads nor CUDA survive a fork). It leaves when the peer process has
ended, however, or has closed the control socket; each rank is on a leash and dies with it, and with a rank die the
processes that the rank started.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

MAX_PACKET = 1 << 12
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # of prctl, from linux/prctl.h


def main() -> None:
    """`rank_zygote.py PEER_PID CONTROL_FD SYS_PATH MODULES`, the latter two as JSON lists."""
    peer = os.pidfd_open(os.getppid())
    if os.getppid() != int(sys.argv[1]):
        os._exit(0)
    control = socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.path[:] = json.loads(sys.argv[3])
    for module in json.loads(sys.argv[4]):
        try:
            importlib.import_module(module)
        except Exception:  # the rank that needs it fails by it, and says so
            pass
    gc.collect()
    gc.freeze()  # collections in ranks leave the shared pages alone
    _say(control, {"threads": len(os.listdir("/proc/self/task"))})
    zygote = os.getpid()
    if (forked := attend(control, peer)) is not None:
        name, line = forked
        become(name, line, parent=zygote)
    os._exit(0)


def attend(control: socket.socket, peer: int) -> tuple[str, socket.socket] | None:
    """Fork and reap until the peer process has gone. In a forked child: returns its name and its line at once."""
    children: dict[int, int] = {}  # pidfd -> pid, not reaped yet: the pid is still theirs
    with control, selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(peer, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == peer:
                    return None
                if key.fd in children:
                    selector.unregister(key.fd)
                    _say(control, {"ended": children[key.fd], "code": _reaped(children.pop(key.fd))})
                    os.close(key.fd)
                    continue
                try:
                    packet, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET, 1)
                except ConnectionResetError:  # the peer process died before it had read all that we said
                    return None
                if not packet:
                    return None
                order: dict[str, Any] = json.loads(packet)
                line = socket.socket(fileno=descriptors[0])
                line.set_inheritable(False)
                if pid := os.fork():
                    line.close()
                    handle = os.pidfd_open(pid)
                    children[handle] = pid
                    selector.register(handle, selectors.EVENT_READ)
                    _say(control, {"started": pid}, handle)
                else:
                    for handle in (peer, *children):
                        os.close(handle)
                    return order["name"], line


def _reaped(pid: int) -> int:
    """The exit code of a child that has ended. What it started and left running ends here: the pid is still its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # nobody is left in its process group
        pass
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _say(control: socket.socket, packet: dict[str, int], descriptor: int | None = None) -> None:
    try:
        socket.send_fds(control, [json.dumps(packet).encode()], [] if descriptor is None else [descriptor])
    except (BrokenPipeError, ConnectionResetError):  # the peer process has gone, and so shall we in a moment
        pass


def become(name: str, line: socket.socket, *, parent: int) -> None:
    """Turn this fork into a rank, until its end. parent: the zygote, with which it dies."""
    from swarmnet.mesh.rank import main as rank_main

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that: no signal comes any more
        os._exit(0)
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)  # what ps and top call it
    rank_main(line)


if __name__ == "__main__":
    main()
