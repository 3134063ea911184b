"""A rank's program for tests of `mesh.group`: sums over ranks and axes, and every way to fail."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from swarmnet.errors import BadMessage, Overflow, Refused, RejectCode
from swarmnet.mesh.process_comm import ProcessComm
from swarmnet.mesh.rank import Handler, RankContext


def make(context: RankContext) -> Handler:
    if (how := context.settings.get("fail")) and context.rank == context.settings.get("who", 0):
        fail(how)
    return Toy(context)


def fail(how: str) -> None:
    if how == "abort":
        os.abort()
    if how == "exit":
        os._exit(7)
    raise ValueError(f"as ordered: {how}")


class Toy:
    def __init__(self, context: RankContext) -> None:
        self.context, self.all = context, ProcessComm()
        half = context.ranks // 2
        rows = [list(range(half)), list(range(half, context.ranks))] if half else [[0]]
        self.row = context.new_group(rows)
        self.column = context.new_group([list(pair) for pair in zip(*rows, strict=True)])
        self.total = torch.zeros(4)

    def __call__(self, name: str, fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        mine = fields.get("rank") in (None, self.context.rank)
        match name:
            case "echo":
                return {"rank": self.context.rank, "pid": os.getpid(), **fields}
            case "nothing":
                return None
            case "sum":
                x = torch.full((4,), float(self.context.rank + 1))
                return {name: comm.all_reduce(x)[0].item()
                        for name, comm in (("all", self.all), ("row", self.row), ("column", self.column))}
            case "add":
                memory = self.context.memory(fields["memory"]).view(torch.float32)
                memory[self.context.rank] += fields["value"]
            case "collectives":
                for _ in range(fields["times"]):
                    self.total = self.all.all_reduce(torch.full((fields["size"],), 1.0))
                return {"total": self.total[0].item()}
            case "wait" if mine:
                time.sleep(fields["seconds"])
            case "compute" if mine:
                x = torch.ones(256, 256)
                end = time.monotonic() + fields["seconds"]
                while time.monotonic() < end:
                    x = (x @ x).clamp(max=1.0)
            case "meet" if not mine:
                self.all.all_reduce(self.total)
            case "fail" if mine:
                fail(fields["how"])
            case "bad" if mine:
                raise BadMessage(RejectCode.NON_FINITE, "no number", element=3, where=torch.float32)
            case "refuse" if mine:
                raise Refused(RejectCode.NOT_FOUND, "no such key")
            case "overflow" if mine:
                raise Overflow("too much", bits=64)
        return {}
