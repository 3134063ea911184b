"""`swarmnet trainer` as a process. Composes; decides nothing."""

from __future__ import annotations

import asyncio
import contextlib

import torch

from swarmnet import telemetry
from swarmnet.clock import loop_time, run_loop
from swarmnet.config.peer import PeerConfig
from swarmnet.data.source import load_tokens
from swarmnet.manifest.codec_names import named_by
from swarmnet.manifest.file import run_id
from swarmnet.manifest.schema import Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.net.away import remember, until_answered, was_in
from swarmnet.net.background import running
from swarmnet.net.endpoint import NOTHING_BETWEEN, Wrap, open_endpoint
from swarmnet.net.stop import stopped_by_signal, unless_stopped
from swarmnet.pipeline.router import RoutingRule, routing_rule
from swarmnet.pipeline.windows import OwnTokens
from swarmnet.telemetry.events import EventLog
from swarmnet.telemetry.journal import Journal, remind
from swarmnet.telemetry.run_state import RunState
from swarmnet.trainer.trainer import Trainer
from swarmnet.wire.codecs import use_all

log = telemetry.get(__name__)


def run_trainer(config: PeerConfig, manifest: Manifest, *, wrap: Wrap = NOTHING_BETWEEN) -> int:
    """Feed the run to its last step. Returns the exit code.

    Raises UsageError if the run's tokens are not here, or one of its codecs is not installed: who takes part in a run
    has what the run needs.
    """
    use_all(named_by(manifest))
    rule = routing_rule(config.routing)
    torch.set_num_threads(config.threads)
    tokens = load_tokens(config.data or manifest.data.source, manifest.data.tokenizer, base=config.data_folder)
    own = OwnTokens(tokens, manifest.data, manifest.training)
    with EventLog(config.events) as events:
        return run_loop(_feed(config, manifest, own, events, wrap, rule))


async def _feed(
    config: PeerConfig, manifest: Manifest, own: OwnTokens, events: EventLog, wrap: Wrap, rule: RoutingRule
) -> int:
    journal, state = Journal(events, log), RunState()

    def on_event(event: str, fields: dict[str, object]) -> None:
        journal(event, fields)
        state.on(event, fields, now=loop_time())

    async with contextlib.AsyncExitStack() as stack:
        stop = stack.enter_context(stopped_by_signal())
        joining = until_answered(
            lambda: stack.enter_async_context(
                open_endpoint(RunTerms.of(manifest), config.network, numerics="trainer", role="trainer")
            ),
            say=lambda event, words: on_event(event, {"reason": words}),
            patient=was_in(config.dir, run_id(manifest)),
        )
        endpoint = await unless_stopped(stop, joining)
        # Asked to stop while it was joining.
        if endpoint is None:
            on_event("stopped", {"reason": "asked to stop before it had joined"})
            return 0
        remember(config.dir, run_id(manifest))
        trainer = Trainer(
            endpoint, manifest, transport=wrap.transport(endpoint.transport), tokens=own, on_event=on_event, rule=rule
        )
        async with endpoint.serve(wrap.service(trainer)), asyncio.TaskGroup() as group:
            on_event("listening", endpoint.whereabouts())
            feeding = group.create_task(trainer.run())
            feeding.add_done_callback(lambda _: stop.set())
            async with running(wrap.background(), remind(log, state)):
                await stop.wait()
            # What is in flight stays with the peers that have it: they finish it without being asked.
            reason = "the run is complete" if feeding.done() else "asked to stop: peers finish what was sent to them"
            feeding.cancel()
            await trainer.leave()
        on_event("stopped", {"reason": reason})
    return 0
