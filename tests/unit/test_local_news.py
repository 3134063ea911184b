"""Which events become a line on the terminal, and that each does so once."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnet.local.screen import PATIENCE_S, News
from swarmnet.telemetry.run_state import RunState


class Told:
    """News, and the states of the processes that run."""

    def __init__(self) -> None:
        self.news, self.processes = News(), dict[str, RunState]()

    def on(self, name: str, event: dict[str, Any], *, now: float) -> list[str]:
        self.processes.setdefault(name, RunState()).on(event["event"], event, now=now)
        return self.news.on(name, event)

    def gone(self, name: str, *, back: bool) -> list[str]:
        self.processes.pop(name)
        return self.news.gone(name, self.processes, back=back)

    def tick(self, *, now: float) -> list[str]:
        return self.news.tick(self.processes, now=now)


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, **fields}


def up(link: str) -> dict[str, Any]:
    return event("listening", peer="peer", dht=["dht"], links=[f"far-{link}", link])


def synced(stage: int, version: int, how: str) -> dict[str, Any]:
    return event("synced", stage=stage, version=version, how=how, seconds=0.1)


def test_one_link_is_printed_and_another_one_when_it_leads_nowhere_any_more() -> None:
    news = Told()
    assert news.on("s0-r0", up("a"), now=0.0) == ["join it while it runs: swarmnet join a"]
    assert news.on("s1-r0", up("b"), now=0.0) == []
    assert news.gone("s1-r0", back=False) == []
    assert news.on("s1-r0", up("b"), now=1.0) == []
    assert news.gone("s0-r0", back=True) == [] and news.on("s0-r0", up("a"), now=2.0) == []  # at its old port
    assert news.gone("s0-r0", back=True) == []
    assert news.on("s0-r0", up("c"), now=3.0) == ["join it while it runs: swarmnet join c"]  # at another
    assert news.gone("s0-r0", back=False) == ["join it while it runs: swarmnet join b"]
    assert news.gone("s1-r0", back=False) == []
    assert news.on("s2-r0", up("d"), now=4.0) == ["join it while it runs: swarmnet join d"]


@pytest.mark.parametrize(
    ("how", "words"),
    [("checkpoint", "from an older checkpoint of its own"), ("snapshot", "fetched from other replicas")],
)
def test_a_bad_checkpoint_is_named_and_what_is_used_instead(how: str, words: str) -> None:
    news = Told()
    (line,) = news.on("s1-r0", event("checkpoint_bad", path="/x/stage-1-step-8", reason="torn"), now=0.0)
    assert "s1-r0" in line and "/x/stage-1-step-8" in line and "torn" in line
    assert news.on("s1-r1", synced(1, 8, "checkpoint"), now=1.0) == []
    assert news.on("s1-r0", synced(1, 4, how), now=1.0) == [f"s1-r0 goes on from version 4, {words}"]
    assert news.on("s1-r0", synced(1, 9, "snapshot"), now=2.0) == []


def test_a_full_disk_is_said_once_a_process() -> None:
    news = Told()
    assert len(news.on("s1-r0", event("checkpoint_failed", path="/x", reason="no space left"), now=0.0)) == 1
    assert news.on("s1-r0", event("checkpoint_failed", path="/y", reason="no space left"), now=9.0) == []
    assert len(news.on("s1-r1", event("checkpoint_failed", path="/y", reason="no space left"), now=9.0)) == 1


def test_last_weights_that_could_not_be_written_are_said_whatever_was_said_before() -> None:
    news = Told()
    news.on("s1-r0", event("checkpoint_failed", path="/x", reason="no space left"), now=0.0)
    last = event("finished", stage=1, version=9, path="/y", problem="no space left")
    assert news.on("s1-r0", last, now=9.0) == [
        "s1-r0: the final weights of stage 1 could not be written to /y: no space left"
    ]
    del last["problem"]
    assert news.on("s1-r1", last, now=9.0) == []


def test_a_wait_is_worth_a_word_when_it_lasts_and_then_what_most_say() -> None:
    news = Told()
    for name, reason in (("a", "little"), ("b", "all"), ("c", "all")):
        assert news.on(name, event("waiting", reason=reason), now=0.0) == []
    assert news.tick(now=PATIENCE_S - 0.1) == []
    assert news.tick(now=PATIENCE_S) == ["waiting: all"] and news.tick(now=PATIENCE_S + 1) == []
    for name in "bc":
        news.on(name, synced(0, 4, "checkpoint"), now=6.0)
    assert news.tick(now=7.0) == ["waiting: little"]
    news.on("a", event("waiting", reason="something else"), now=8.0)
    assert news.tick(now=8.1) == []
    assert news.gone("a", back=True) == [] and news.tick(now=99.0) == []


def test_what_a_trainer_waited_for_is_over_when_all_stages_are_served() -> None:
    news = Told()
    news.on("trainer-0", event("waiting", reason="nobody serves stage 1 yet"), now=0.0)
    news.on("trainer-0", event("complete", peers=4), now=1.0)
    assert news.tick(now=99.0) == []


def test_what_all_replicas_say_is_said_once() -> None:
    news = Told()
    assert len(news.on("s0-r0", event("restart", number=1, version=4, reason="heard of it"), now=0.0)) == 1
    assert news.on("s0-r1", event("restart", number=1, version=4, reason="decided it"), now=0.1) == []
    dropped = event("dropped", stage=1, to=4, microbatches=9, reason="made anew")
    assert len(news.on("s0-r0", dropped, now=0.2)) == 1 and news.on("s0-r1", dropped, now=0.3) == []
