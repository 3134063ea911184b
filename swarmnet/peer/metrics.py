"""Figures of a running peer for Prometheus, and whether it lives and is ready, over HTTP: `--metrics`.

`/metrics` has the figures (names begin with `swarmnet_`, base units, no peer ids), `/state` the state from which they
and all that is shown of this peer come, as JSON, `/trace` the spans of its last steps. `/healthz` says whether the
event loop answers, `/readyz` whether the peer serves its stages: 200 or 503, with the reason in words. Needs the extra
`metrics`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.message import Message
from functools import partial
from typing import TYPE_CHECKING, Any

from swarmnet import __version__
from swarmnet.config.check import check_installed
from swarmnet.config.peer import listen_at
from swarmnet.net.traffic import Traffic
from swarmnet.telemetry.log import encode, plain
from swarmnet.telemetry.run_state import STEP_BUCKETS_S
from swarmnet.telemetry.trace import trace
from swarmnet.telemetry.web import Response, foreign, listening

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from swarmnet.peer.peer import Peer

MOST_TRACED = 8192
"""Spans of an answer, the newest: the event loop makes it, 2 MB in 0.05 s."""


def figures(peer: Peer, traffic: Traffic) -> Iterator[Metric]:
    """Of this moment, as prometheus_client wants them."""
    from prometheus_client.core import CounterMetricFamily as Count
    from prometheus_client.core import GaugeMetricFamily as Gauge
    from prometheus_client.core import HistogramMetricFamily

    record, seen = peer.status(), peer.state
    last = seen.points[-1] if seen.points else None

    def by_stage(rows: Iterable[Any], figure: str) -> dict[int, float]:
        return {row.stage: float(getattr(row, figure)) for row in rows}

    mine, done = partial(by_stage, record.stages), partial(by_stage, seen.stages.values())
    serving = Counter(
        status.stage
        for stages in (record.stages, *(other.stages for other in peer.records.values()))
        for status in stages
        if status.synced
    )
    table: list[tuple[Any, str, str, float | Mapping[Any, float] | None]] = [
        (Gauge, "paused", "1: it takes no new microbatches, as asked.", peer.paused),
        (Gauge, "halted", "1: the run cannot continue here until a peer joins.", seen.halted is not None),
        (Gauge, "tasks", "Of its event loop, running or waiting.", len(asyncio.all_tasks())),
        (Gauge, "known_peers", "Peers whose records it holds, itself left out.", len(peer.records)),
        (Gauge, "run_tokens_per_second", "Of the whole run, over the last steps.", record.tokens_per_second),
        (Gauge, "loss", "Mean loss of the last step, nats per token.", last.loss if last else None),
        (Gauge, "gradient_norm", "Of the last step's average gradient.", last.grad_norm if last else None),
        (Gauge, "weights_version", "Steps that its weights have behind them.", mine("version")),
        (Gauge, "synced", "1: it has the stage's state and serves.", mine("synced")),
        (Gauge, "slots", "Microbatches that it holds at once, in each open step.", mine("slots")),
        (Gauge, "queued_microbatches", "Waiting for or in execution.", mine("queue")),
        (Gauge, "replicas", "With state, of those it knows, itself among them.", serving),
        (Count, "steps", "Steps applied.", done("steps")),
        (Count, "microbatches_executed", "Microbatches executed, including re-executions.", done("executed")),
        (Count, "microbatches_counted", "Microbatches in committed aggregates.", done("contributed")),
        (Count, "averaging_sent_bytes", "Bytes of aggregates sent.", done("sent_bytes")),
        (Count, "events", "Lines of its events file, by name.", seen.events),
        (Count, "sent_bytes", "Bytes sent over the data plane.", traffic.up.total),
        (Count, "received_bytes", "Bytes received over the data plane.", traffic.down.total),
    ]
    info = Gauge("swarmnet_build_info", "Always 1.", labels=["version", "run"])
    info.add_metric([__version__, peer.run_id[:12]], 1)
    yield info
    for kind, name, text, value in table:
        if isinstance(value, Mapping):
            family = kind(f"swarmnet_{name}", text, labels=["event" if name == "events" else "stage"])
            for key, each in sorted(value.items()):
                family.add_metric([str(key)], each)
            yield family
        # Before the first step there is no loss.
        elif value is not None:
            yield kind(f"swarmnet_{name}", text, value)

    below, buckets = 0, []
    for bound, count in zip((*map(str, STEP_BUCKETS_S), "+Inf"), seen.durations, strict=True):
        below += count
        buckets.append((bound, float(below)))
    yield HistogramMetricFamily("swarmnet_step_duration_seconds", "Between two steps applied.", buckets, seen.seconds)


def not_ready(peer: Peer) -> str:
    """Why it does not serve all its stages, in words; "" if it does."""
    if peer.state.halted is not None:
        return f"the run halted at version {peer.state.halted}"
    # One that is alone with a stage's state serves on.
    if peer.paused and all(replica.execution.leaving for replica in peer.replicas.values()):
        return "paused, as asked"
    waits = [str(status.stage) for status in peer.status().stages if not status.synced]
    return f"no state yet of stage {', '.join(waits)}" if waits else ""


class _Collector:
    """What prometheus_client asks."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect


@contextlib.contextmanager
def serve_metrics(where: str, peer: Peer, traffic: Traffic) -> Iterator[str]:
    """Listen there, at [HOST:]PORT, until the context is left; yields http://HOST:PORT. For the event loop.

    Raises UsageError if it cannot listen there, or the extra is not installed.
    """
    check_installed("--metrics", "metrics")
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(_Collector(lambda: figures(peer, traffic)))
    ProcessCollector(registry=registry)

    host, port = listen_at(where)

    def respond(path: str, headers: Message) -> Response:
        match path:
            case "/metrics":
                write, kind = choose_encoder(headers.get("Accept", ""))
                return Response(200, write(registry), kind)
            # Figures are for scrapers, which may know this machine by another name; whom it knows is not for any page.
            case "/state" | "/trace" if (refused := foreign(headers, (host, socket.gethostname()))) is not None:
                return refused
            case "/state":
                words = encode({"not_ready": not_ready(peer), **plain(peer.state)})
                return Response(200, words.encode(), "application/json")
            case "/trace":
                spans = peer.spans.since(max(peer.spans.added - MOST_TRACED, 0))
                return Response(200, trace(peer.me, peer.label, spans), "application/json")
            case "/healthz":
                return Response(200, b"ok\n")
            case "/readyz":
                reason = not_ready(peer)
                return Response(503 if reason else 200, f"{reason or 'ok'}\n".encode())
        return Response(404, b"there are /metrics, /state, /trace, /healthz and /readyz\n")

    with listening(f"--metrics {where}", host, port, respond) as at:
        yield at
