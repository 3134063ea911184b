"""The ranks of a peer as real processes: orders, every way to die, and that nothing is ever left of them."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_launchers import KeptLaunchers

from swarmnet.errors import BadMessage, Overflow, RankLost, Refused, RejectCode
from swarmnet.ranks.launcher import ChildCall, Launcher
from swarmnet.ranks.supervisor import PRELOAD, RankGroup

RANKS = 4
DEADLINE_S = 60.0
GONE_MS = 20_000


def toy(
    settings: dict[str, Any] | None = None, program: str = "rank_toy:make", ranks: int = RANKS, **options: Any
) -> RankGroup:
    """Ranks that have not been started."""
    return RankGroup(program, settings or {}, devices=["cpu"] * ranks, deadline_s=DEADLINE_S, **options)


@pytest.fixture(scope="module")
def one_group() -> Iterator[RankGroup]:
    group = toy(memory={"first": ((RANKS,), "float32"), "second": ((RANKS,), "float32")})
    yield group
    group.close()


@pytest.fixture
def group(one_group: RankGroup) -> RankGroup:
    """Ranks that run."""
    if not one_group.pids:
        one_group.start()
    return one_group


@pytest.fixture(scope="module")
def launchers() -> Iterator[KeptLaunchers]:
    with closing(KeptLaunchers()) as kept:
        yield kept


@pytest.fixture
def fork_server(launchers: KeptLaunchers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks fork from a process that is there before the test and after it."""
    launchers((*PRELOAD, "rank_toy"))
    monkeypatch.setattr("swarmnet.ranks.supervisor.Launcher", launchers)


@contextmanager
def all_gone(*pids: int) -> Iterator[None]:
    """The block ends these processes, unless they have ended already; returns once they have."""
    handles = {}
    for pid in pids:
        with suppress(ProcessLookupError):
            handles[pid] = os.pidfd_open(pid)
    try:
        yield
        for pid, handle in handles.items():
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            assert ended.poll(GONE_MS), f"{pid} lives"
    finally:
        for handle in handles.values():
            os.close(handle)


def descendants() -> set[int]:
    """Processes below this one, dead ones that nobody has reaped included."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def left_behind() -> tuple[int, set[int], set[str]]:
    """What a group may leave: descriptors, processes, names of files."""
    files = {str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob("swarmnet-r*")}
    return len(os.listdir("/proc/self/fd")), descendants(), files


def down(group: RankGroup) -> None:
    """Have its ranks lost."""
    os.kill(group.pids[0], signal.SIGKILL)
    with pytest.raises(RankLost):
        while True:
            group.check()


def sums(group: RankGroup) -> list[tuple[float, float, float]]:
    return [(each["all"], each["row"], each["column"]) for each in group.order("sums")]


SUMS = [(10, 3, 4), (10, 3, 6), (10, 7, 4), (10, 7, 6)]


def lost_by(call: Callable[[], object], group: RankGroup) -> RankLost:
    """Why the ranks are lost; all are gone when we hear it, and the group works again once started."""
    with all_gone(*group.pids), pytest.raises(RankLost) as caught:
        call()
    assert not group.pids
    group.start()
    assert sums(group) == SUMS
    return caught.value


# ---------------------------------------------------------------- orders


def test_an_order_goes_to_all_ranks_and_all_answer(group: RankGroup) -> None:
    numbers = [0.1, 1e-320, float("inf"), 2**63, -0.0]
    answers = group.order("echo", numbers=numbers, words="grün", name="taken")
    assert [(each["rank"], each["pid"]) for each in answers] == list(enumerate(group.pids))
    assert all(each["numbers"] == numbers and each["words"] == "grün" and each["name"] == "taken" for each in answers)
    assert group.order("nothing") == [{}] * RANKS


def test_sums_over_ranks_and_axes(group: RankGroup) -> None:
    assert sums(group) == SUMS


def test_large_fields_cross(group: RankGroup) -> None:
    values = [random.Random(0).random() for _ in range(6_000)]  # 120 kB of JSON each way, per rank
    assert all(each["values"] == values for each in group.order("echo", values=values))
    with pytest.raises(ValueError, match="at most 131072"):
        group.order("echo", values=2 * values)


def test_memory_is_shared_in_every_epoch(group: RankGroup) -> None:
    first, second = (group.memory.places[name] for name in ("first", "second"))
    group.order("write", memory="second", value=7.0)
    assert second.tolist() == [7.0, 8.0, 9.0, 10.0] and not first.any()
    group.start()
    group.order("write", memory="first", value=1.0)
    assert first.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert second.tolist() == [7.0, 8.0, 9.0, 10.0]


def test_what_is_no_json_is_not_sent(group: RankGroup) -> None:
    with pytest.raises(TypeError):
        group.order("echo", tensor=torch.zeros(1))
    assert sums(group) == SUMS


def test_orders_of_several_threads_take_turns(group: RankGroup) -> None:
    found: dict[int, list[Any]] = {}

    def ask(me: int) -> None:
        found[me] = [group.order("echo", me=me, turn=turn) for turn in range(20)]

    threads = [threading.Thread(target=ask, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(
        each["me"] == me and each["turn"] == turn
        for me, answers in found.items()
        for turn, every in enumerate(answers)
        for each in every
    )
    assert len(found) == 3


def test_what_all_ranks_raise_is_raised_here_and_they_live(group: RankGroup) -> None:
    pids = group.pids
    with pytest.raises(BadMessage, match="no number") as bad:
        group.order("raise", kinds=["bad"])
    assert bad.value.code is RejectCode.NON_FINITE
    assert bad.value.facts == {"code": "non_finite", "element": 3, "dtype": "torch.float32"}
    with pytest.raises(Refused, match="no such key") as refused:
        group.order("raise", kinds=["refused"])
    assert refused.value.code is RejectCode.NOT_FOUND
    with pytest.raises(Overflow, match="too much"):
        group.order("raise", kinds=["overflow"])
    assert group.pids == pids and sums(group) == SUMS


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kinds": ["bad", "refused"]}, r"rank 0 it raised BadMessage.*rank 1 it raised Refused"),
        ({"kinds": ["bad"], "who": 2}, r"rank 0 it was done; on rank 2 it raised BadMessage"),
        ({"kinds": ["overflow"], "who": 0}, r"rank 0 it raised Overflow.*; on rank 1 it was done"),
    ],
)
def test_ranks_that_disagree_are_lost(group: RankGroup, fields: dict[str, Any], words: str) -> None:
    lost = lost_by(lambda: group.order("raise", **fields), group)
    assert lost.rank is None
    with pytest.raises(RankLost, match=words):
        raise lost


@pytest.mark.parametrize("others", ["idle", "meet"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", "was ended by SIGKILL"),
        ("abort", "was ended by SIGABRT"),
        ("exit", "left with exit code 7"),
        ("raise", "ValueError: raise"),
    ],
)
def test_a_rank_that_ends_is_named(group: RankGroup, how: str, words: str, others: str) -> None:
    began = time.monotonic()
    lost = lost_by(lambda: group.order("fail", how=how, who=2, others=others), group)
    assert lost.rank == 2 and words in lost.reason and "'fail'" in lost.reason
    assert time.monotonic() - began < DEADLINE_S / 4


def test_a_rank_that_lets_the_deadline_pass_is_named_and_says_where_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    with toy_group() as group:  # its ranks write to the stderr of now
        for how in ("hang", "compute"):
            lost = lost_by(lambda: group.order("fail", deadline_s=0.2, how=how, who=1), group)  # noqa: B023
            assert lost.rank == 1 and lost.reason == "rank 1 gave no answer to 'fail' within 0.2 s"
            assert "rank_toy.py" in capfd.readouterr().err


def test_several_ranks_that_hang_in_a_collective_are_named(group: RankGroup) -> None:
    lost = lost_by(lambda: group.order("fail", deadline_s=0.2, how="hang", who=1, others="meet"), group)
    assert lost.rank is None and lost.reason == "ranks 0, 1, 2, 3 gave no answer to 'fail' within 0.2 s"


def test_an_order_that_a_stopped_rank_does_not_even_read_has_a_deadline(group: RankGroup) -> None:
    os.kill(group.pids[1], signal.SIGSTOP)
    lost = lost_by(lambda: group.order("echo", deadline_s=0.2), group)
    assert lost.rank == 1


def test_a_rank_that_dies_between_orders_shows_at_the_next_and_to_who_looks(group: RankGroup) -> None:
    group.check()
    for look in (group.check, lambda: group.order("sums")):
        with all_gone(group.pids[0]):
            os.kill(group.pids[0], signal.SIGKILL)
        lost = lost_by(look, group)
        assert lost.rank == 0 and "SIGKILL" in lost.reason


def test_an_answer_that_is_no_json_ends_the_ranks(group: RankGroup) -> None:
    lost = lost_by(lambda: group.order("unspeakable"), group)
    assert "TypeError" in lost.reason and "Tensor" in lost.reason


def test_ranks_leave_the_signals_of_a_terminal_to_the_peer_process(group: RankGroup) -> None:
    for pid in group.pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert sums(group) == SUMS


def test_what_a_rank_started_ends_with_it(group: RankGroup) -> None:
    children = [each["pid"] for each in group.order("children")]
    with all_gone(*children):
        down(group)


def test_what_ranks_started_ends_with_the_group() -> None:
    with toy_group(ranks=2) as group:
        children = [each["pid"] for each in group.order("children")]
        with all_gone(*children):
            group.close()


@pytest.mark.usefixtures("fork_server")
def test_an_order_under_way_ends_at_once_when_the_group_is_ended() -> None:
    with toy_group() as group:
        caught: list[RankLost] = []

        def ask() -> None:
            with pytest.raises(RankLost) as lost:
                group.order("fail", how="hang")
            caught.append(lost.value)

        thread = threading.Thread(target=ask)
        thread.start()
        with all_gone(*group.pids):
            group.close()
        thread.join(DEADLINE_S / 4)
        assert not thread.is_alive() and len(caught) == 1 and "closed" in caught[0].reason


# ---------------------------------------------------------------- beginnings


@contextmanager
def toy_group(**options: Any) -> Iterator[RankGroup]:
    """Ranks that run, of a group of their own."""
    group = toy(**options)
    try:
        group.start()
        yield group
    finally:
        group.close()


def test_a_group_without_ranks_says_so() -> None:
    group = toy()
    with pytest.raises(RankLost, match="no rank runs"):
        group.order("sums")
    group.close()
    for _ in range(2):
        for call in (group.start, group.check):
            with pytest.raises(RankLost, match="closed"):
                call()
    group.close()


def test_a_start_under_way_ends_at_once_when_the_group_is_ended() -> None:
    """The process that forks ranks is stopped, so this start would wait for its deadline."""
    before = left_behind()
    group = toy(ranks=2)
    group.start()
    forks = parent_of(group.pids[0])
    down(group)
    os.kill(forks, signal.SIGSTOP)
    caught: list[RankLost] = []

    def start() -> None:
        with pytest.raises(RankLost) as lost:
            group.start()
        caught.append(lost.value)

    before_start = len(os.listdir("/proc/self/fd"))
    thread = threading.Thread(target=start)
    thread.start()
    while len(os.listdir("/proc/self/fd")) < before_start + 3:  # a store, and a rank's line
        threading.Event().wait(0.001)
    with all_gone(forks):
        group.close()
    thread.join(DEADLINE_S / 4)
    assert not thread.is_alive() and len(caught) == 1 and "closed" in caught[0].reason
    assert left_behind() == before


def test_imports_that_take_longer_than_a_start_may_are_not_begun_again() -> None:
    group = toy(ranks=2)
    others = descendants()
    try:
        for _ in range(2):
            with pytest.raises(RankLost, match="did not answer in time"):
                group.start(deadline_s=0.001)
        (forks,) = descendants() - others
        group.start()
        assert {parent_of(pid) for pid in group.pids} == {forks}
    finally:
        group.close()


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(RankLost, match="ModuleNotFoundError: No module named 'no_such_program'"):
        with toy_group(program="no_such_program:make"):
            pass


@pytest.mark.usefixtures("fork_server")
def test_a_start_that_fails_says_why_and_leaves_nothing() -> None:
    before = left_behind()
    group = toy({"2": (2, "raise"), "3": (1, "abort"), "4": (3, "stop")})
    group.start()
    running = len(os.listdir("/proc/self/fd"))
    for rank, words in (
        (2, "ValueError: raise"),
        (1, "was ended by SIGABRT during 'start'"),
        (None, "ranks 0, 1, 2, 3 gave no answer to 'start' within 2 s"),
    ):
        with all_gone(*group.pids), pytest.raises(RankLost) as lost:
            group.start(deadline_s=2.0 if rank is None else DEADLINE_S)
        assert lost.value.rank == rank and words in lost.value.reason and not group.pids
    group.start()
    assert sums(group) == SUMS and group.epoch == 5 and len(os.listdir("/proc/self/fd")) == running
    group.close()
    group.close()
    assert left_behind() == before


def test_a_rank_killed_while_ranks_start_ends_the_start(group: RankGroup) -> None:
    down(group)
    killed = threading.Event()

    def kill() -> None:
        while not (pids := group.pids):
            pass
        os.kill(pids[0], signal.SIGKILL)
        killed.set()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        group.start()
    except RankLost as lost:
        assert lost.rank == 0 and "SIGKILL" in lost.reason
    else:  # it came too late for the start
        assert killed.wait(DEADLINE_S)
        with pytest.raises(RankLost):
            group.order("sums")
    thread.join()
    group.start()
    assert sums(group) == SUMS


def test_without_the_process_that_forks_ranks_another_one_is_made(group: RankGroup) -> None:
    forks = parent_of(group.pids[0])
    with all_gone(forks, *group.pids):
        os.kill(forks, signal.SIGKILL)
    lost = lost_by(lambda: group.order("sums"), group)
    assert "ended" in lost.reason


def test_a_program_that_starts_threads_when_imported_gets_fresh_interpreters() -> None:
    before = left_behind()
    with toy_group(program="rank_threaded_toy:make", ranks=2) as group:
        with all_gone(*group.pids), pytest.raises(RankLost, match="rank 1 was ended by SIGKILL"):
            group.order("fail", how="kill", who=1, others="meet")
    assert left_behind() == before


# ---------------------------------------------------------------- nothing is left


def test_restarts_leave_no_descriptor_and_no_zombie(group: RankGroup) -> None:
    running, others = len(os.listdir("/proc/self/fd")), descendants() - set(group.pids)
    for _ in range(3):
        pids = set(group.pids)
        group.start()
        assert len(os.listdir("/proc/self/fd")) == running
        deadline = time.monotonic() + GONE_MS / 1000
        while left := descendants() - others - set(group.pids):  # a busy fork server reaps a little later
            assert time.monotonic() < deadline, f"{left} were left behind"
        assert not pids & descendants()


def test_ranks_die_with_a_peer_process_that_is_killed(tmp_path: Path) -> None:
    """Whatever they do: one computes, one is stopped, two wait in a collective. The peer process is a fork itself."""
    before = left_behind()
    output = tmp_path / "output"
    os.mkfifo(output)
    with os.fdopen(os.open(output, os.O_RDWR), buffering=1) as lines:
        launcher = Launcher(("torch",))
        peer = launcher.start(ChildCall(("-m", "rank_peer"), "peer", output=output), time.monotonic() + DEADLINE_S)
        pids = json.loads(next(line for line in lines if line.startswith("[")))
        seen = [next(line for line in lines if "is apart" in line) for _ in pids]
        forks = parent_of(pids[0])
        with all_gone(peer.pid, forks, *pids):
            peer.send(signal.SIGKILL)
        peer.close()
        assert len(seen) == RANKS
        launcher.close()
    assert left_behind() == before


# ---------------------------------------------------------------- many kills


def kill_at_random(kills: int, seed: int) -> list[float]:
    """Kill random ranks at random moments; seconds from each kill until all ranks were gone and we knew."""
    rng = random.Random(seed)
    before = left_behind()
    seconds: list[float] = []
    group = toy(memory={"some": ((1 << 14,), "float32")})
    group.start()
    running = len(os.listdir("/proc/self/fd"))

    def kill(victim: int, delay: float, number: signal.Signals, at: list[float], pids: tuple[int, ...]) -> None:
        threading.Event().wait(delay)
        while len(pids) <= victim:  # while they start: as soon as it is there
            threading.Event().wait(0.001)
            pids = group.pids
        at.append(time.monotonic())
        with suppress(ProcessLookupError):
            os.kill(pids[victim], number)

    for _ in range(kills):
        starting = rng.random() < 0.2
        number = rng.choice([signal.SIGKILL] * 4 + [signal.SIGABRT] + [signal.SIGSTOP] * (not starting))
        limit_s = 2.0 if number == signal.SIGSTOP else DEADLINE_S
        at: list[float] = []
        if starting:
            down(group)
        thread = threading.Thread(
            target=kill, args=(rng.randrange(RANKS), rng.uniform(0, 0.05), number, at, () if starting else group.pids)
        )
        thread.start()
        try:
            if starting:
                group.start()
            while True:
                group.order("work", deadline_s=limit_s, times=rng.randint(1, 20), size=1 << rng.randint(0, 14))
        except RankLost:
            thread.join()
            seconds.append(time.monotonic() - at[0])
        assert not group.pids
        group.start()
        assert sums(group) == SUMS and len(os.listdir("/proc/self/fd")) == running
    group.close()
    assert left_behind() == before
    return seconds


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.long)])
def test_random_ranks_killed_at_random_moments(kills: int) -> None:
    seconds = kill_at_random(kills, seed=kills)
    print(f"{kills} kills: known after {sorted(seconds)[kills // 2]:.3f} s, {max(seconds):.3f} s at most")
    assert len(seconds) == kills and max(seconds) < 2.0 + DEADLINE_S / 4


# ---------------------------------------------------------------- with GPUs


@pytest.mark.gpu
def test_ranks_on_all_gpus_by_the_same_code() -> None:
    count = torch.cuda.device_count()
    group = RankGroup(
        "rank_toy:make",
        {},
        devices=[f"cuda:{n}" for n in range(count)],
        deadline_s=DEADLINE_S,
        memory={"memory": ((count,), "float32")},
    )
    numbers = group.memory.places["memory"]
    try:
        for epoch in (1, 2):
            group.start()
            assert group.order("sums")[0]["all"] == sum(range(count + 1))
            assert all(each["pinned"] for each in group.order("write", memory="memory", value=1.0))
            assert numbers.tolist() == [1.0 + rank for rank in range(count)]
            with pytest.raises(RankLost, match="SIGKILL"):
                group.order("fail", how="kill", who=count - 1, others="meet")
            assert group.epoch == epoch
    finally:
        group.close()
