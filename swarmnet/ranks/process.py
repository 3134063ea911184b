"""A rank: the process that owns one device of a peer and does what the peer process orders.

It joins the process group, makes the program's handler, reports that it is ready, then answers orders one by one; never
two at once, so all collectives are issued by one thread, in the order of orders. When the peer process has ended, the
fork server (`ranks.fork`) ends the rank within milliseconds, in a collective or not. The rank ignores SIGINT and
SIGTERM, which the peer process handles. It never tears its group down, because gloo may abort a process that has done
everything right: it sends its last packet and leaves by `os._exit`, or is killed. Knows no model: the program does.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from swarmnet.ranks.channel import ALIKE, ChannelClosed, ChildChannel, Packet, packed, packet_of
from swarmnet.ranks.comm import ProcessComm
from swarmnet.ranks.memory import SharedMemory, pin
from swarmnet.ranks.supervisor import DUMP
from swarmnet.wire import kernel_build

Handler = Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]
"""Does one order, (name, fields), and returns the fields of the answer."""

NO_LIMIT = timedelta(days=1)
"""Of a collective. The peer process holds the deadlines: it ends all ranks, at whatever they are."""

LOOPBACK = "lo"

PIN_BYTES = 256 << 20
"""What crosses with each microbatch is less. States and sums of a large stage are hundreds of GiB: to pin them takes
minutes, in every rank, at each start, and a rank reads and writes its share of them once a step."""


class RankContext:
    """What a program is made from. `settings` is what the peer process gave, the same for all ranks.

    epoch: how often the ranks were started, this time included.
    """

    def __init__(self, hello: Packet, shared: SharedMemory) -> None:
        self.rank, self.ranks, self.device = hello["rank"], hello["ranks"], torch.device(hello["device"])
        self.settings, self.epoch = hello["settings"], hello["epoch"]
        self.memory = shared.places
        """The places of the shared memory, on the CPU; small ones are pinned for a CUDA device."""
        for memory in shared.places.values():
            if self.device.type == "cuda" and memory.nbytes <= PIN_BYTES:
                pin(memory)

    def new_group(self, lists: Sequence[Sequence[int]]) -> ProcessComm:
        """This rank's end of one of several groups, none of which share a rank: of the list it is in.

        Every rank calls it alike, and only while the program's handler is made. `.group` is torch's own group.
        """
        assert sorted(rank for ranks in lists for rank in ranks) == list(range(self.ranks)), lists
        groups = [dist.new_group(list(ranks), timeout=NO_LIMIT) for ranks in lists]
        return ProcessComm(next(group for group, ranks in zip(groups, lists, strict=True) if self.rank in ranks))


def main(end: int, store: int, memory: int) -> NoReturn:
    """Be the rank at this end of the channel. The process ends with the channel, or when the program fails.

    Descriptors. store: ranks meet in it. memory: of what they share with the peer process.
    """
    channel, code = ChildChannel(socket.socket(fileno=end)), 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the peer process decides
            signal.signal(number, signal.SIG_IGN)
        faulthandler.register(DUMP, chain=True)
        torch.set_num_threads(1)  # ranks share the cores of one machine
        kernel_build.prepare(threads=1)
        _answer(channel, _joined(channel, store, memory))
    except ChannelClosed:  # the peer process is gone
        code = 0
    except BaseException as error:  # whatever it is, the peer process is told why
        traceback.print_exc()
        # Between ranks the earliest is to blame: the others fail because a partner in a collective is gone.
        words = "".join(traceback.format_exception_only(error)).strip()
        channel.send(packed({"failed": words[:4000], "at": time.monotonic()}))
    finally:
        sys.stderr.flush()
        os._exit(code)


def _joined(channel: ChildChannel, store: int, memory: int) -> Handler:
    """The first packet says what this rank is: map memory, join the group, make the program's handler."""
    hello, _ = channel.receive()
    device = torch.device(hello["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before memory is pinned: that takes memory on the device it is
    shared = SharedMemory(hello["memory"], memory)
    os.close(shared.descriptor)
    context = RankContext(hello, shared)
    # ranks are on one machine: nothing of theirs may go over its network, or wait for its name service
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=FileStore(f"/proc/self/fd/{store}", context.ranks),
        rank=context.rank,
        world_size=context.ranks,
        timeout=NO_LIMIT,
        device_id=device if device.type == "cuda" else None,
    )
    module, _, factory = hello["program"].partition(":")
    handler: Handler = getattr(importlib.import_module(module), factory)(context)
    channel.send(packed({"ready": {}}))
    return handler


def _answer(channel: ChildChannel, handler: Handler) -> NoReturn:
    while True:
        packet, _ = channel.receive()
        try:
            answer = packed({"done": handler(packet["order"], packet["fields"]) or {}})
        except ALIKE as error:
            answer = packed({"raised": packet_of(error)})
        channel.send(answer)
