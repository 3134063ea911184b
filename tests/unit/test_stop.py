"""The first Ctrl+C or SIGTERM sets an event while a command runs; after it both are the system's again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from swarmnet.errors import UsageError
from swarmnet.net.stop import stopped_by_signal, unless_stopped


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started us may have it ignored
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, hang_up)


async def test_a_terminal_that_goes_asks_and_never_ends_the_process() -> None:
    """The shell and the kernel each send SIGHUP, and a logout adds SIGTERM: together they are one request."""
    with stopped_by_signal() as stop:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
            async with asyncio.timeout(5):
                await stop.wait()
    signal.raise_signal(signal.SIGHUP)  # the process ends by itself now


async def test_with_nohup_a_terminal_that_goes_asks_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stopped_by_signal() as stop:
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0)
        assert not stop.is_set()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_asks_to_stop_and_ends_nothing(number: signal.Signals) -> None:
    with stopped_by_signal() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        async with asyncio.timeout(5):
            await stop.wait()
        assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_one_ends_the_process_whatever_it_does(first: signal.Signals, second: signal.Signals) -> None:
    stuck = f"""
import asyncio, signal
from swarmnet.errors import UsageError
from swarmnet.net.stop import stopped_by_signal, unless_stopped
async def story():
    with stopped_by_signal() as stop:
        signal.raise_signal({int(first)})
        await stop.wait()
        signal.raise_signal({int(second)})
asyncio.run(story())
"""
    assert subprocess.run([sys.executable, "-c", stuck], timeout=30).returncode == -second


async def test_without_a_signal_they_are_as_before() -> None:
    with stopped_by_signal():
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_under_way_when_the_stop_comes_is_cancelled() -> None:
    cleaned: list[str] = []

    async def forever() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("up")
        return 1

    async def story() -> int | None:
        with stopped_by_signal() as stop:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            async with asyncio.timeout(5):
                return await unless_stopped(stop, forever())

    assert asyncio.run(story()) is None and cleaned == ["up"]


def test_without_a_stop_work_returns_and_fails_as_if_alone() -> None:
    async def done() -> int:
        return 7

    async def refused() -> int:
        raise UsageError("no")

    assert asyncio.run(unless_stopped(asyncio.Event(), done())) == 7
    with pytest.raises(UsageError, match="no"):
        asyncio.run(unless_stopped(asyncio.Event(), refused()))
