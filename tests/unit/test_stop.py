"""Ctrl+C and SIGTERM set an event while a command runs, and are the system's again afterwards."""

from __future__ import annotations

import asyncio
import signal

import pytest

from swarmnet.net.stop import stopped_by_signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop_and_ends_nothing(number: signal.Signals) -> None:
    async def story() -> None:
        with stopped_by_signal() as stop:
            assert not stop.is_set()
            signal.raise_signal(number)
            async with asyncio.timeout(5):
                await stop.wait()
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)

    asyncio.run(story())
