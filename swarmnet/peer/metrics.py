"""Figures of a running peer for Prometheus: `/metrics` of its HTTP server. They need the extra `metrics`.

Names begin with `swarmnet_`; base units, no peer ids.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from swarmnet import __version__
from swarmnet.config.check import check_installed
from swarmnet.errors import UsageError
from swarmnet.net.traffic import Traffic
from swarmnet.telemetry.run_state import STEP_BUCKETS_S
from swarmnet.telemetry.web import Response

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from swarmnet.peer.peer import Peer


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
        (Gauge, "known_peers", "Peers of which it has the record, itself left out.", len(peer.records)),
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


class _Collector:
    """What prometheus_client asks."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect


def exposition(peer: Peer, traffic: Traffic, accept: str) -> Response:
    """The answer to a scraper that accepts this; what to install, if the extra is not."""
    try:
        check_installed("/metrics", "metrics")
    except UsageError as error:
        return Response(501, f"{error.message}\n".encode())
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(_Collector(partial(figures, peer, traffic)))
    ProcessCollector(registry=registry)
    write, kind = choose_encoder(accept)
    return Response(200, write(registry), kind)
