"""A rank's program for tests of `ranks.supervisor`: sums over ranks and axes, memory, and every way to fail."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

import torch

from swarmnet.errors import BadMessage, Overflow, Refused, RejectCode
from swarmnet.ranks.process import Handler, RankContext

FOREVER_S = 1000.0


def make(context: RankContext) -> Handler:
    """settings: {epoch: (rank, how)}, who fails how before it is ready."""
    rank, how = context.settings.get(str(context.epoch), (-1, ""))
    if rank == context.rank:
        fail(how)
    return Toy(context)


def fail(how: str) -> None:
    match how:
        case "abort":
            os.abort()
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(FOREVER_S)
        case "compute":
            x = torch.ones(256, 256)
            end = time.monotonic() + FOREVER_S
            while time.monotonic() < end:
                x = (x @ x).clamp(max=1.0)
        case _:
            raise ValueError(how)


class Toy:
    """Of four ranks: rows 0 1 and 2 3, columns 0 2 and 1 3."""

    def __init__(self, context: RankContext) -> None:
        self.context, self.all = context, context.new_group([list(range(context.ranks))])
        half = max(context.ranks // 2, 1)
        rows = [list(range(context.ranks))[at : at + half] for at in range(0, context.ranks, half)]
        self.row = context.new_group(rows)
        self.column = context.new_group([list(column) for column in zip(*rows, strict=True)])

    def __call__(self, name: str, fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        rank, device = self.context.rank, self.context.device
        mine = fields.get("who", rank) == rank
        match name:
            case "echo":
                return {"rank": rank, "pid": os.getpid(), "epoch": self.context.epoch, **fields}
            case "nothing":
                return None
            case "sums":
                comms = {"all": self.all, "row": self.row, "column": self.column}
                x = torch.full((4,), rank + 1.0, device=device)
                return {axis: comm.all_reduce(x)[0].item() for axis, comm in comms.items()}
            case "write":
                memory = self.context.memory[fields["memory"]]
                memory[rank] = torch.tensor(fields["value"], device=device) + rank
                return {"pinned": memory.is_pinned() if device.type == "cuda" else None}
            case "work":  # collectives and arithmetic in turns
                x = torch.ones(fields["size"], device=device)
                for _ in range(fields["times"]):
                    x = self.all.all_reduce(x) / self.context.ranks
                    x = x.clone().clamp_(max=2.0)
                return {"x": x[0].item()}
            case "fail" if mine:
                fail(fields["how"])
            case "fail" if fields.get("others") == "meet":
                self.all.all_reduce(torch.zeros(4))
            case "apart":  # one computes, one is stopped, the others are in a collective
                os.write(2, f"rank {rank} is apart\n".encode())  # in one piece, among four who write
                if how := {1: "compute", 2: "stop"}.get(rank):
                    fail(how)
                self.all.all_reduce(torch.zeros(4))
            case "children":  # that outlive us, if nobody cares for them
                child = subprocess.Popen(["sleep", str(FOREVER_S)])
                return {"pid": child.pid}
            case "raise" if mine:
                raise {
                    "bad": BadMessage(RejectCode.NON_FINITE, "no number", element=3, dtype=torch.float32),
                    "refused": Refused(RejectCode.NOT_FOUND, "no such key"),
                    "overflow": Overflow("too much", bits=64),
                }[fields["kinds"][rank % len(fields["kinds"])]]
            case "unspeakable":
                return {"tensor": torch.zeros(1)}
        return {}
