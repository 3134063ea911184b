"""gloo's all_reduce and hivemind's DecentralizedAverager over the vector of `benchmarks/averaging.py`."""

from __future__ import annotations

import asyncio
import datetime
import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from averaging_place import Place, die, sample_of, vector_of

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]

# ---------------------------------------------------------------- gloo


def start_gloo(place: Place) -> None:
    """Join the group, over loopback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{place.file}",
        rank=place.rank,
        world_size=place.peers,
        timeout=datetime.timedelta(seconds=120),
    )


def gloo_turn(vector: torch.Tensor) -> dict[str, Any]:
    """One all-reduce of a copy."""
    copy = vector.clone()
    torch.distributed.barrier()
    began = time.monotonic()
    torch.distributed.all_reduce(copy)
    ended = time.monotonic()
    return {"began": began, "ended": ended, "sample": sample_of(copy)}


# ---------------------------------------------------------------- hivemind


class HivemindPeer:
    """A DHT node and one averager per compression, in processes of their own as hivemind has it.

    An averager stamps when its all-reduce proper began and ended; what is left of a step is matchmaking.
    """

    def __init__(self, place: Place, vector: torch.Tensor, pipe: Connection) -> None:
        import hivemind
        from hivemind.averaging import DecentralizedAverager
        from hivemind.compression import Float16Compression, NoCompression

        multiprocessing.set_start_method("fork", force=True)  # what hivemind expects
        stamps = multiprocessing.get_context("fork").Array("d", 3)

        class Stamped(DecentralizedAverager):  # type: ignore[misc]
            """Says when it averaged."""

            async def _aggregate_with_group(self, *args: Any, **kwargs: Any) -> Any:
                stamps[0] = time.monotonic()
                if stamps[2]:
                    asyncio.get_running_loop().call_later(stamps[2], die)
                try:
                    return await super()._aggregate_with_group(*args, **kwargs)
                finally:
                    stamps[1] = time.monotonic()

        self._stamps = stamps
        if place.rank == 0:
            self._dht = hivemind.DHT(host_maddrs=LOOPBACK, start=True)
            pipe.send([str(address) for address in self._dht.get_visible_maddrs()])
        else:
            self._dht = hivemind.DHT(initial_peers=pipe.recv(), host_maddrs=LOOPBACK, start=True)
        self.vector = vector
        self._averagers = {
            name: Stamped(
                [self.vector],
                self._dht,
                prefix=f"bench_{name}",
                target_group_size=place.peers,
                start=True,
                compression=compression,
                min_matchmaking_time=3.0,
                declare_state_period=3600,
                allow_state_sharing=False,
            )
            for name, compression in {"fp32": NoCompression(), "fp16": Float16Compression()}.items()
        }
        self._mine = vector_of(place)

    def die(self, delay_s: float) -> None:
        """Kill this peer so long after its next all-reduce began."""
        self._stamps[2] = delay_s

    def turn(self, name: str, exactly: int, timeout_s: float) -> dict[str, Any]:
        """Average until a group of `exactly` so many has done so, or `timeout_s` has passed."""
        members = [0]
        # After a member's death `step` itself can block without end, whatever its timeout says: leave it behind.
        trying = threading.Thread(target=self._try, args=(name, exactly, timeout_s, members), daemon=True)
        began = time.monotonic()
        trying.start()
        trying.join(timeout_s)
        return {
            "began": began,
            "ended": time.monotonic(),
            "phase": (self._stamps[0], self._stamps[1]),
            "members": members[-1],
            "rounds": len(members) - 1,
            "sample": sample_of(self.vector),
        }

    def _try(self, name: str, exactly: int, timeout_s: float, members: list[int]) -> None:
        with self._averagers[name].get_tensors() as (tensor,):
            tensor.copy_(self._mine)
        until = time.monotonic() + timeout_s
        while members[-1] != exactly and (left_s := until - time.monotonic()) > 0:
            step = self._averagers[name].step(timeout=left_s, wait=False)
            try:
                members.append(len(step.result(left_s) or ()))
            except Exception:  # whatever went wrong, the next attempt counts
                members.append(0)
                step.cancel()

    def close(self) -> None:
        """End the processes."""
        for averager in self._averagers.values():
            averager.kill()
        self._dht.kill()
