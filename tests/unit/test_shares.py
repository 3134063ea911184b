"""Who shares a rate with others, on virtual time: whoever floods delays them by a piece, and the rate is kept."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.net.traffic import RELAY_SHARE, UNMEASURED, Shares, Traffic

pytestmark = pytest.mark.virtual_time

RATE, CHUNK = 1e6, 256 << 10


async def floods(shares: Shares, who: str, crossed: dict[str, int]) -> None:
    while True:
        await shares.turn(who, CHUNK)
        crossed[who] = crossed.get(who, 0) + CHUNK


async def test_many_streams_of_one_have_no_more_than_one_of_another() -> None:
    shares, crossed = Shares(lambda: RATE), dict[str, int]()
    flood = [asyncio.create_task(floods(shares, who, crossed)) for who in ("one", *["many"] * 50)]
    await asyncio.sleep(60)
    assert 0.9 < sum(crossed.values()) / RATE / 60 < 1.1
    assert abs(crossed["one"] - crossed["many"]) < 60 * CHUNK
    begins = asyncio.get_running_loop().time()
    await shares.turn("greets", 2000)
    assert asyncio.get_running_loop().time() - begins < 0.1
    # Who gives up leaves its turn to the next.
    for task in flood[1::2]:
        task.cancel()
    before = crossed["one"]
    await asyncio.sleep(10)
    assert crossed["one"] - before > 0.4 * 10 * RATE
    for task in flood:
        task.cancel()


async def test_a_capped_line_passes_less_on() -> None:
    traffic = Traffic()
    assert traffic.relays(0.0) == RELAY_SHARE * UNMEASURED and traffic.relays(5e6) == 5e6
    traffic.up.set_rate(1e6)
    assert traffic.relays(0.0) == RELAY_SHARE * 1e6 and traffic.relays(5e6) == 1e6
