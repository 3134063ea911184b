"""Four ranks of a real process group, for test_rank_stage; started by `group_processes.run_group`.

They train what FSDP2 shards, and some of what it does not, in all the meshes of four ranks, and report how far each is
from one process.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from group_processes import become_ranks
from mesh_training import CASES, Case, Rank, far, held_bytes, layout_of, train_alone

from swarmnet.ranks.comm import ProcessComm


def main(backend: str, rank: int, size: int, store: str) -> dict[str, dict[str, object]]:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit)
    comms = {tensor: axes(rank, tensor, size // tensor) for tensor in {case.tensor for case in CASES.values()}}
    return {name: run(case, *comms[case.tensor]) for name, case in CASES.items()}


def axes(rank: int, tensor: int, data: int) -> tuple[ProcessComm, ProcessComm]:
    """This rank's groups (data, tensor). Every rank makes all groups."""
    along_data = [dist.new_group([d * tensor + t for d in range(data)]) for t in range(tensor)]
    along_tensor = [dist.new_group([d * tensor + t for t in range(tensor)]) for d in range(data)]
    d, t = divmod(rank, tensor)
    return ProcessComm(along_data[t]), ProcessComm(along_tensor[d])


def run(case: Case, data: ProcessComm, tensor: ProcessComm) -> dict[str, object]:
    """How far it is from one process, what it holds, and whether an update makes the same bits of the same sum."""
    manifest = case.manifest()
    layout = layout_of(tensor.size, data.size, case.shard, sequence_parallel=case.sequence_parallel)
    rank = Rank(manifest, case.stage, layout, data=data, tensor=tensor, memory=case.memory)
    begin = train_alone(manifest, case.stage, steps=case.start).state
    rank.stage.read_state(case.start, begin)
    found = rank.train(start=case.start, steps=case.steps)
    held = [held_bytes(rank.stage), rank.held_in_flight()]
    expected = train_alone(manifest, case.stage, start=case.start, steps=case.steps)
    rank.stage.read_state(case.start, begin)
    stepped = train_alone(manifest, case.stage, start=case.start, steps=1)
    state = rank.one_update(case.start, stepped.total)
    return {
        "far": far(found, expected, begin, rank.rows),
        "held": held,
        "writers": rank.writers_of(case.start + 1).unique().tolist(),
        "other bits": [name for name, tensor in state.items() if not torch.equal(tensor, stepped.state[name])],
    }


if __name__ == "__main__":
    become_ranks(main, modules=("swarmnet.ranks.fully_sharded", "torch._dynamo"))
