"""What ranks run in test_gpu_stage: the contract of `Comm` on their device, and copies to it from shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from swarmnet.ranks.comm import ProcessComm
from swarmnet.ranks.process import Handler, RankContext
from tests.contracts.comm_contract import CHECKS


def make(context: RankContext) -> Handler:
    comm = ProcessComm()

    def handle(name: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        if name == "check":
            with context.device:
                for check in CHECKS:
                    check(comm)
            return {"checks": len(CHECKS)}
        numbers = context.memory[fields["memory"]]
        here = numbers[fields["start"] : fields["stop"]].to(context.device, copy=True)
        total = comm.all_reduce(here.double().square_().sum())
        numbers[fields["start"] + context.rank] = total.cpu()
        return {
            "pinned": numbers.is_pinned() if context.device.type == "cuda" else None,
            "current": torch.cuda.current_device() if context.device.type == "cuda" else None,
        }

    return handle
