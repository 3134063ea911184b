"""A peer that holds the run's last version says so, and says whether it is on its disk."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnet.local.progress import SwarmProgress
from swarmnet.peer.peer import Peer
from swarmnet.peer.run import _keep_last
from swarmnet.state.disk import Written
from swarmnet.telemetry.run_state import StageState


@pytest.mark.parametrize("problem", [None, "No space left on device"])
def test_last_weights_that_are_not_on_the_disk_are_not_said_to_be(problem: str | None) -> None:
    async def write_now() -> Written:
        return Written(cast(Any, SimpleNamespace(version=9, sha256="w")), problem)

    checkpoints = SimpleNamespace(write_now=write_now, path=lambda version: f"/x/{version}")
    replica = SimpleNamespace(state=SimpleNamespace(checkpoints=checkpoints))
    events: list[tuple[str, dict[str, object]]] = []
    say = lambda event, fields: events.append((event, fields))  # noqa: E731
    asyncio.run(_keep_last(cast(Peer, SimpleNamespace(replicas={2: replica}, say=say))))
    ((event, fields),) = events
    assert (event, fields["path"], fields.get("problem")) == ("finished", "/x/9", problem)
    assert ("swarmnet export" in str(fields.get("advice"))) == (problem is None)


def test_what_one_replica_could_not_write_another_may_have() -> None:
    progress = SwarmProgress(steps=9, replicas={name: StageState(0) for name in ("s0-r0", "s0-r1")})
    held: dict[str, Any] = {"event": "finished", "stage": 0, "version": 9, "path": "/x/9"}
    progress.on("s0-r0", held | {"problem": "full"}, now=0.0)
    assert progress.lost_weights == {0: "s0-r0 could not write /x/9: full"}
    late = SwarmProgress(steps=9, replicas=dict(progress.replicas), unwritten=dict(progress.unwritten))
    progress.on("s0-r1", held, now=0.0)
    assert progress.lost_weights == {}
    late.on("s0-r0", {"event": "checkpoint", "stage": 0, "version": 9}, now=0.0)  # when it left there was room
    assert late.lost_weights == {}
