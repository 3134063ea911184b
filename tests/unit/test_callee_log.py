"""What callers do wrong is logged, and no caller fills the log with it, under however many names."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, ManifestRequest, Rejected
from swarmnet.net.grpc_callee import Callee
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.limits import ALL_COMPLAINTS, COMPLAINTS
from swarmnet.net.traffic import Traffic
from swarmnet.testing.doubles import FakeService, run_virtual


async def refused(callee: Callee, *callers: str) -> None:
    """Each of them calls and hears that it is refused."""
    heard: list[Answer] = []

    async def answer(said: Answer) -> None:
        heard.append(said)

    for caller in callers:
        inbound = cast(Any, SimpleNamespace(answer=answer))
        await callee._answer(PeerId(caller), ManifestRequest(), inbound, cast(Any, None))
    assert heard == [Rejected(RejectCode.NOT_SERVED, "not here")] * len(callers)


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_a_refusal_is_logged_once_a_minute_of_each_and_of_few(level: int, caplog: pytest.LogCaptureFixture) -> None:
    dialling = cast(
        Any,
        SimpleNamespace(
            greeter=None, dials=None, config=GrpcConfig(), leaf=SimpleNamespace(peer=None), lives=None, on_twin=None
        ),
    )
    callee = Callee(
        dialling,
        lambda: cast(Any, FakeService(lambda *_: Refused(RejectCode.NOT_SERVED, "not here"))),
        lambda peer: None,
        Traffic(),
        lambda message: b"",
        cast(Any, None),
    )

    def lines() -> int:
        count = [record.message for record in caplog.records].count("refused")
        caplog.clear()
        return count

    most = ALL_COMPLAINTS.per_s * ALL_COMPLAINTS.burst_s

    async def story() -> None:
        await refused(callee, *["a"] * 100)
        assert lines() == (1 if level == logging.INFO else 100)
        await asyncio.sleep(0.5 / COMPLAINTS.per_s)
        crowd = [f"name {number}" for number in range(300)]
        await refused(callee, *crowd, "a")
        assert lines() == (most if level == logging.INFO else 301), "names are free"
        await asyncio.sleep(0.6 / COMPLAINTS.per_s)
        await refused(callee, *crowd, "late")
        assert lines() == (round(0.6 * most) if level == logging.INFO else 301), "no name twice a minute"

    with caplog.at_level(level, "swarmnet.net.grpc_callee"):
        run_virtual(story())
