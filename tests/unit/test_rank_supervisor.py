"""Which rank is to blame when ranks are lost: one that died without a packet, otherwise the first that failed."""

import signal
import socket
import threading

from swarmnet.ranks.channel import ChildChannel, channel_pair, packed
from swarmnet.ranks.supervisor import DUMP, Rank, cause, late, receive


class Process:
    """Of a rank that is only a channel: it has ended with `code`, or ends by the first signal."""

    pid = 0  # nobody's

    def __init__(self, code: int | None = None) -> None:
        self.ended, self.signals = code, list[signal.Signals]()

    def send(self, number: signal.Signals) -> None:
        self.signals.append(number)
        self.ended = -number

    def wait(self, deadline: float) -> bool:
        return self.ended is not None

    def code(self) -> int | None:
        return self.ended

    def close(self) -> None:
        pass


def ranks(*codes: int | None) -> tuple[list[Rank], list[socket.socket]]:
    """Ranks whose processes have ended so; their own ends are still open."""
    pairs = [channel_pair() for _ in codes]
    return (
        [
            Rank(number, ChildChannel(ours), Process(code))
            for number, ((ours, _), code) in enumerate(zip(pairs, codes, strict=True))
        ],
        [theirs for _, theirs in pairs],
    )


def failure(words: str) -> dict[str, object]:
    return {"failed": words, "at": 5.0}


def send(end: socket.socket, packet: dict[str, object]) -> None:
    ChildChannel(end).send(packed(packet))


def test_packets_and_ends_are_received_together() -> None:
    group, ends = ranks(None, None, -9)
    group[0].channel.send(packed({"order": "x"}))
    send(ends[1], {"done": {}})
    ends[2].close()
    packets, ended = receive(group, 10.0)
    assert packets == {1: {"done": {}}}
    assert [rank.number for rank in ended] == [2]
    assert ChildChannel(ends[0]).receive()[0] == {"order": "x"}
    assert receive(group[:2], 0.0) == ({}, [])


def test_a_dead_rank_is_blamed_before_one_that_failed_by_it() -> None:
    group, ends = ranks(None, -9, None)
    ends[1].close()
    lost = cause(group, {0: failure("ConnectionError: gone")}, [], "forward")
    assert lost.rank == 1
    assert lost.reason == "rank 1 was ended by SIGKILL during 'forward'; rank 0 failed: ConnectionError: gone"
    del ends


def test_a_death_that_shows_a_little_later_counts() -> None:
    group, ends = ranks(None, -6)
    threading.Timer(0.02, ends[1].close).start()
    assert cause(group, {0: failure("gone")}, [], "x").rank == 1


def test_the_first_to_fail_is_blamed_not_the_first_heard() -> None:
    group, ends = ranks(None, None, None)
    send(ends[1], {"failed": "ValueError: mine", "at": 4.0})
    send(ends[2], {"failed": "gone, too", "at": 6.0})
    lost = cause(group, {0: failure("gone")}, [], "backward")
    assert (lost.rank, lost.reason) == (1, "rank 1 failed during 'backward': ValueError: mine")


def test_a_rank_that_answers_meanwhile_is_not_waited_for() -> None:
    group, ends = ranks(None, None)
    send(ends[1], {"done": {}})
    assert cause(group, {0: failure("ValueError")}, [], "x").rank == 0


def test_ends_are_told_in_words() -> None:
    group, _ = ranks(7, -11, -63)
    expected = ("left with exit code 7", "was ended by SIGSEGV", "was ended by signal 63")
    for rank, words in zip(group, expected, strict=True):
        assert words in cause(group, {}, [rank], "x").reason
    unknown, _ = ranks(0)
    unknown[0].process.code = lambda: None  # type: ignore[method-assign]
    assert "unknown exit code" in cause(unknown, {}, unknown, "x").reason


def test_ranks_that_hang_are_asked_where_they_are() -> None:
    group, _ = ranks(None, None)
    lost = late(group, "update", 2.5)
    assert lost.rank is None and lost.reason == "ranks 0, 1 gave no answer to 'update' within 2.5 s"
    assert all(rank.process.signals == [DUMP] for rank in group)  # type: ignore[attr-defined]
    assert late(group[1:], "update", 2).rank == 1
