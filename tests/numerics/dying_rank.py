"""The program of a rank that kills itself when an order says so: `die` is [rank, "before" or "after"], or "hangs".

Or never writes its mirror from then on: "never writes".
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

from swarmnet.ranks import program
from swarmnet.ranks.process import Handler, RankContext

PROGRAM = f"{__name__}:handler"


def handler(context: RankContext) -> Handler:
    inner = program.handler(context)

    def handle(name: str, fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        rank, when = fields.get("die", (None, ""))
        if rank == context.rank and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == context.rank and when == "hangs":
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == context.rank and when == "never writes":
            inner._stage.write_state = lambda *_: threading.Event().wait()  # type: ignore[attr-defined]
        answer = inner(name, fields)
        if rank == context.rank and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    return handle
