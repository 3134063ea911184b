"""The program of a rank that kills itself when an order says so: `die` is [rank, "before" or "after"], or "hangs".

Or as it writes its copy of the state: "writing". The order "held" is answered by the keys of the microbatches that it
holds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from swarmnet.ranks import program
from swarmnet.ranks.process import Handler, RankContext

PROGRAM = f"{__name__}:handler"


def handler(context: RankContext) -> Handler:
    inner = program.Program(context)
    inner.held = lambda: None  # type: ignore[attr-defined]

    def handle(name: str, fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        rank, when = fields.get("die", (None, ""))
        fields = {key: value for key, value in fields.items() if key != "die"}
        if rank == context.rank and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == context.rank and when == "hangs":
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == context.rank and when == "writing":
            inner._stage.write_state = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if name == "held":
            inner("held", fields)
            return {"keys": [*inner._works]}
        answer = inner(name, fields)
        if rank == context.rank and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    return handle
