"""One rank of a real process group, for test_tensor_parallel: `group_rank.py BACKEND RANK SIZE STORE FD`.

Runs the contract of `Comm` and a whole model, with and without sequence parallelism, and writes what it found as JSON
to the pipe FD. Leaves without tearing the group down: gloo may then abort a process that has done everything right.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from rank_stages import LENGTH, MODEL, against, module_of, on_rank, through

from swarmnet.model.tensor_plan import TensorSplit
from swarmnet.ranks.comm import ProcessComm
from tests.contracts.comm_contract import CHECKS


def main(backend: str, rank: int, size: int, store: str, fd: int) -> None:
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
    with os.fdopen(fd, "w") as pipe:
        json.dump({"differences": found, "checks": len(CHECKS)}, pipe)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
