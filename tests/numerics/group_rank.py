"""Ranks of a real process group, for test_tensor_parallel; started by `group_processes.run_group`.

They run the contract of `Comm` and a whole model, with and without sequence parallelism, and report what they found.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from group_processes import become_ranks
from rank_stages import LENGTH, MODEL, against, module_of, on_rank, through

from swarmnet.model.tensor_plan import TensorSplit
from swarmnet.ranks.comm import ProcessComm
from tests.contracts.comm_contract import CHECKS


def main(backend: str, rank: int, size: int, store: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit)
    comm = ProcessComm()
    with device:
        for check in CHECKS:
            check(comm)
    model = MODEL.model_copy(update={"num_kv_heads": 1})
    dtype = torch.float64
    expected = through(module_of(model, "whole", dtype).to(device), "whole", dtype)
    found = {}
    for sequence_parallel in (False, True):
        seen = on_rank(comm, model, "whole", dtype, sequence_parallel=sequence_parallel, device=device)
        split = TensorSplit(model, size, LENGTH, sequence_parallel=sequence_parallel)
        found[str(sequence_parallel)] = against(seen, expected, split, rank)
    return {"differences": found, "checks": len(CHECKS)}


if __name__ == "__main__":
    become_ranks(main)
