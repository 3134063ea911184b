"""The one HTTP server of a running peer, `--dashboard`: the dashboard of its run, figures and health. Read-only.

`/` is the dashboard. `/metrics` has figures for Prometheus (needs the extra `metrics`), `/state` the state from which
they and all that is shown of this peer come, as JSON, `/trace` the spans of its last steps. `/healthz` says whether the
event loop answers, `/readyz` whether the peer serves its stages: 200 or 503, with the reason in words.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from email.message import Message
from functools import cache, partial
from typing import TYPE_CHECKING

from swarmnet.clock import loop_time
from swarmnet.config.peer import listen_at
from swarmnet.net.parent_death import dies_with_parent, same_python
from swarmnet.net.traffic import Traffic
from swarmnet.peer.metrics import exposition
from swarmnet.telemetry.kinds import OnEvent
from swarmnet.telemetry.log import encode, plain
from swarmnet.telemetry.trace import trace
from swarmnet.telemetry.web import DashboardPage, Response, listening

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer

MOST_TRACED = 8192
"""Spans of an answer, the newest: 2 MB, which a thread makes in 0.05 s or more while the event loop goes on."""

TRACE_S = 5.0
"""So long one trace is the answer to all who ask: as many as they are, one is made."""

AWAY_S = 300.0
"""After so long without a request the run is no longer watched: a page in the background asks once a minute."""

_AGAIN_S = 30.0
"""After looks that failed, if a page still asks."""

_MOST_BYTES = 1 << 24
"""Of one look: far more than `monitor.page` makes."""

_END_S = 2.0
"""So long a peer that leaves waits for the end of its looks."""


class RunLooks:
    """Has a process of its own look at the run for as long as a page asks, and serve nothing (`swarmnet dashboard`).

    One look at 24 members takes 60 ms of computing, every 2 s: 3 % of what the event loop has. That process's work
    comes after this one's, and its end is none of the peer's. links: to the run, this machine's own address last.
    """

    def __init__(self, links: Callable[[], Sequence[str]], say: OnEvent) -> None:
        self._links, self._say = links, say
        self._wanted, self._wanted_at = asyncio.Event(), 0.0
        self.page = DashboardPage(self._want)

    def _want(self) -> None:
        self._wanted_at = loop_time()
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wanted.wait()
            if reason := await self._look():
                self._say("no_dashboard", {"reason": reason, "then": "the peer goes on"})
                await asyncio.sleep(_AGAIN_S)
            self._wanted.clear()

    async def _look(self) -> str:
        """Until no page has asked for `AWAY_S`: then "". Or why it has ended before."""
        command = [*same_python(), "-m", "swarmnet", "dashboard", *self._links()[-1:], "--json"]
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *dies_with_parent(*command),
                stdout=asyncio.subprocess.PIPE,
                limit=_MOST_BYTES,
                start_new_session=True,  # Ctrl+C is this process's, which then ends that one
            )
            # Never above this process, which may be nice itself: only root may do that. The system stops at 19.
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + 10)
            assert process.stdout is not None
            while loop_time() - self._wanted_at < AWAY_S:
                if not (line := await process.stdout.readline()):
                    return f"its process ended with exit code {await process.wait()}"
                self.page.look(partial(bytes.strip, line))
            return ""
        # There is no such process, or no room for one, or a look is longer.
        except (OSError, ValueError) as error:
            return str(error)
        finally:
            if process is not None and process.returncode is None:
                process.terminate()  # and it dies with this process, if that is sooner
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_END_S):
                        await process.communicate()  # a pipe with something in it would stay open


def not_ready(peer: Peer) -> str:
    """Why it does not serve all its stages, in words; "" if it does."""
    if peer.state.halted is not None:
        return f"the run halted at version {peer.state.halted}"
    # One that is alone with a stage's state serves on.
    if peer.paused and all(replica.execution.leaving for replica in peer.replicas.values()):
        return "paused, as asked"
    waits = [str(status.stage) for status in peer.status().stages if not status.synced]
    return f"no state yet of stage {', '.join(waits)}" if waits else ""


@contextlib.contextmanager
def serving_web(where: str, peer: Peer, traffic: Traffic, page: DashboardPage) -> Iterator[str]:
    """Listen there, at [HOST:]PORT, until the context is left; yields http://HOST:PORT. For the event loop.

    Raises UsageError if it cannot listen there.
    """
    host, port = listen_at(where)
    traced: Callable[[], bytes] = bytes
    traced_at = -TRACE_S

    def respond(path: str, headers: Message) -> Response:
        nonlocal traced, traced_at
        match path:
            case "/metrics":
                return exposition(peer, traffic, headers.get("Accept", ""))
            case "/healthz":
                return Response(200, b"ok\n")
            case "/readyz":
                reason = not_ready(peer)
                return Response(503 if reason else 200, f"{reason or 'ok'}\n".encode())
            case "/state":
                words = encode({"not_ready": not_ready(peer), **plain(peer.state)})
                return Response(200, words.encode(), "application/json")
            case "/trace":
                if (now := loop_time()) - traced_at >= TRACE_S:
                    spans = peer.spans.since(max(peer.spans.added - MOST_TRACED, 0))
                    traced, traced_at = cache(partial(trace, peer.me, peer.label, spans)), now
                return Response(200, traced, "application/json")
        return page.respond(path)

    with listening(f"--dashboard {where}", host, port, respond) as at:
        yield at
