"""A replica's checkpoints: at the right versions, one at a time, from one consistent copy, whatever the disk does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import pytest

from swarmnet.ids import NO_RESTART, Chain, Restart, RunId
from swarmnet.messages import StateHeader
from swarmnet.state.checkpoints import Checkpointer, CheckpointSchedule
from swarmnet.state.disk import CheckpointStore, DirectoryDisk, Disk, Written
from swarmnet.testing.virtual_disk import SimulatedDisk

pytestmark = pytest.mark.virtual_time

RUN, STAGE, LAST, EVERY = RunId("a1" * 32), 1, 45, 10
STEP_S = 1.0


class Watched(SimulatedDisk):
    """A disk that notices two writes at once."""

    writing = False

    async def write(self, stage: int, header: StateHeader, data: bytes | memoryview) -> Written:
        assert not self.writing, "two writes at once"
        self.writing = True
        try:
            return await super().write(stage, header, data)
        finally:
            self.writing = False


class Replica:
    """Stands for the engine and the step machine; `train` takes a step a second."""

    def __init__(self, disk: Disk, *, keep: int = 3, every: int = EVERY) -> None:
        self.version: int | None = 0
        self.restart = NO_RESTART
        self.copies = 0
        self.forged = False
        self.copy_s = self.prepare_s = 0.0
        self.prepared: list[int | None] = []
        self.events: list[tuple[str, dict[str, object]]] = []
        self.common: int | None = None
        self.disk = disk
        self.checkpointer = Checkpointer(
            STAGE,
            self,
            self.where,
            disk,
            CheckpointSchedule(every=every, last=LAST),
            keep=keep,
            common=lambda: self.common,  # type: ignore[arg-type]
            on_event=lambda event, fields: self.events.append((event, fields)),
            check_notices=self.check_notices,
        )

    def check_notices(self, notices: tuple[str, ...]) -> None:
        if self.forged:
            raise ValueError("not the owner's")

    def where(self) -> StateHeader | None:
        if self.version is None:
            return None
        return StateHeader(
            self.version, Chain(f"{self.version:064x}"), Chain("0b" * 32), Chain("00" * 32), self.restart
        )

    @staticmethod
    def state(version: int | None) -> bytes:
        return f"state {version}".encode()

    async def prepare_snapshot(self) -> None:
        self.prepared.append(self.version)
        await asyncio.sleep(self.prepare_s)

    async def snapshot(self) -> bytes:
        self.copies += 1
        data = self.state(self.version)
        await asyncio.sleep(self.copy_s)
        return data

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.checkpointer.run())
            yield
            task.cancel()

    async def train(self, steps: int) -> None:
        assert self.version is not None
        for _ in range(steps):
            self.version += 1
            self.checkpointer.reached()
            await asyncio.sleep(STEP_S)

    def of(self, event: str) -> list[dict[str, object]]:
        return [fields for name, fields in self.events if name == event]


@pytest.fixture
def disk() -> Watched:
    return Watched(RUN)


def written(disk: SimulatedDisk) -> list[int]:
    return sorted(version for _, version in disk.files)


async def test_multiples_and_the_end_are_written(disk: Watched) -> None:
    replica = Replica(disk, keep=9)
    async with replica.running():
        await replica.train(LAST)
        await asyncio.sleep(100.0)
    assert written(disk) == [10, 20, 30, 40, 45] == list(replica.checkpointer.versions)
    assert replica.copies == 5
    for (_, version), (info, data) in disk.files.items():
        assert data == replica.state(version) and info.chain == f"{version:064x}"
    assert [fields["version"] for fields in replica.of("checkpoint")] == [10, 20, 30, 40, 45]


@pytest.mark.parametrize("prepare_s", [0.0, 0.9, 1.9])
async def test_memory_is_prepared_a_step_ahead_and_in_time_or_not_the_version_is_written(
    disk: Watched, prepare_s: float
) -> None:
    replica = Replica(disk, keep=9)
    replica.prepare_s = prepare_s
    async with replica.running():
        await replica.train(LAST)
        await asyncio.sleep(100.0)
    assert replica.prepared == [9, 19, 29, 39, 44] and replica.copies == 5
    assert written(disk) == [10, 20, 30, 40, 45]


async def test_without_a_rhythm_the_end_is_written(disk: Watched) -> None:
    replica = Replica(disk, every=0)
    async with replica.running():
        await replica.train(LAST)
    assert written(disk) == [LAST]


@pytest.mark.parametrize("forgotten", [None, 10])
async def test_only_the_last_ones_stay_and_never_without_the_common_one(disk: Watched, forgotten: int | None) -> None:
    replica = Replica(disk, keep=2)
    async with replica.running():
        replica.common = 20
        await replica.train(35)
        assert written(disk) == [20, 30]
        replica.common = forgotten  # a record expired: what was seen stays true
        await replica.train(9)
        assert written(disk) == [20, 30, 40]
        replica.common = 40
        await replica.train(1)
    assert written(disk) == [40, 45] == list(replica.checkpointer.versions)


async def test_what_the_run_may_be_about_to_go_back_to_stays(disk: Watched) -> None:
    replica = Replica(disk, keep=1)
    async with replica.running():
        replica.common = 10
        await replica.train(25)
        replica.checkpointer.spared = 12
        replica.common = 30
        await replica.train(19)
        assert written(disk) == [10, 30, 40]
        replica.checkpointer.spared = -1
        await replica.train(1)
    assert written(disk) == [30, 40, 45]


async def test_what_becomes_common_while_one_is_written_stays(disk: Watched) -> None:
    replica = Replica(disk, keep=1)
    async with replica.running():
        replica.common = 10
        await replica.train(39)
        assert written(disk) == [10, 20, 30]
        disk.write_s = 4.0
        await replica.train(2)  # 40 is on its way
        replica.common = 30
        await replica.train(4)
    assert written(disk) == [30, 40] == list(replica.checkpointer.versions)


async def test_a_slow_disk_skips_versions_and_queues_nothing(disk: Watched) -> None:
    disk.write_s = 15 * STEP_S  # the versions that pass while one is written are multiples too
    replica = Replica(disk, keep=9)
    async with replica.running():
        await replica.train(44)
    assert replica.copies == 2 and written(disk) == [10]
    assert replica.checkpointer.versions == (10,), "announced only when it is on disk"


async def test_the_last_version_is_written_even_if_it_came_while_the_disk_was_busy(disk: Watched) -> None:
    disk.write_s = 12 * STEP_S
    replica = Replica(disk)
    async with replica.running():
        await replica.train(LAST)
        await asyncio.sleep(100.0)
    assert written(disk)[-1] == LAST


async def test_a_full_disk_costs_one_warning_each_time_and_is_tried_again_at_the_next(disk: Watched) -> None:
    replica = Replica(disk)
    disk.full = True
    async with replica.running():
        await replica.train(25)
        assert replica.checkpointer.versions == () and written(disk) == []
        warnings = replica.of("checkpoint_failed")
        assert [fields["version"] for fields in warnings] == [10, 20]
        assert warnings[0] == {
            "version": 10,
            "path": "simulated/stage-1-step-10",
            "reason": "No space left on device",
            "bytes_needed": 8,
            "then": "training goes on; the next checkpoint is tried again",
        }
        disk.full = False
        await replica.train(6)
    assert replica.checkpointer.versions == (30,)


async def test_no_more_is_taken_of_the_disk_than_is_lent(disk: Watched) -> None:
    replica = Replica(disk, keep=9)
    one = len(replica.state(10))
    replica.checkpointer.most_bytes = 2 * one
    async with replica.running():
        await replica.train(31)
        await asyncio.sleep(100.0)
        # Of the older ones the roundest stays: a slower stage is about to have it as well.
        assert written(disk) == [20, 30] and not replica.of("checkpoint_failed")
        replica.checkpointer.most_bytes = one
        await replica.train(10)
        await asyncio.sleep(100.0)
    assert "caps.disk_gib" in str(replica.of("checkpoint_failed")[-1]["reason"])
    assert written(disk) == [20, 30], "nothing is deleted in vain"


async def test_a_full_disk_at_the_end_is_not_tried_for_ever(disk: Watched) -> None:
    replica = Replica(disk, every=0)
    disk.full = True
    async with replica.running():
        await replica.train(LAST)
        await asyncio.sleep(1000.0)
        assert len(replica.of("checkpoint_failed")) == 1
        disk.full = False
        result = await replica.checkpointer.write_now()
        assert result is not None and result.problem is None
    assert replica.checkpointer.versions == (LAST,)


@pytest.mark.parametrize("moves_to", [11, None])
async def test_a_state_that_moves_while_it_is_copied_is_not_written(disk: Watched, moves_to: int | None) -> None:
    replica = Replica(disk)
    replica.copy_s = 5.0
    async with replica.running():
        replica.version = 10
        replica.checkpointer.reached()
        await asyncio.sleep(1.0)
        replica.version = moves_to
        await asyncio.sleep(10.0)
    assert written(disk) == [] and replica.copies == 1 and replica.events == []


async def test_nothing_is_due_without_state(disk: Watched) -> None:
    replica = Replica(disk)
    async with replica.running():
        replica.version = None
        replica.checkpointer.reached()
        await asyncio.sleep(1.0)
        assert await replica.checkpointer.write_now() is None
        replica.version = 10
        replica.checkpointer.reached()
        replica.version = None  # gone before the writer awoke
        await asyncio.sleep(1.0)
    assert replica.copies == 0


async def test_whoever_leaves_writes_where_it_stands_once(disk: Watched) -> None:
    replica = Replica(disk)
    disk.write_s = 5.0
    async with replica.running():
        await replica.train(12)  # 10 is being written
        result = await replica.checkpointer.write_now()
        assert result is not None and result.info.version == 12
        assert written(disk) == [10, 12] and replica.copies == 2
        again = await replica.checkpointer.write_now()
        assert again is not None and again.problem is None and again.info == result.info
    assert replica.copies == 2


async def test_leaving_copies_again_if_the_state_moved(disk: Watched) -> None:
    replica = Replica(disk)
    replica.version, replica.copy_s = 12, 5.0
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(replica.checkpointer.write_now())
        await asyncio.sleep(1.0)
        replica.version = 13
    result = leaving.result()
    assert result is not None and result.info.version == 13 and replica.copies == 2
    assert disk.files[STAGE, 13][1] == replica.state(13)


# ---------------------------------------------------------------- coming back


async def test_a_checkpoint_with_notices_that_the_owner_has_not_signed_is_named_and_not_used(disk: Watched) -> None:
    await filled(disk, (10, NO_RESTART), (20, NO_RESTART))
    replica = Replica(disk)
    replica.forged = True
    await replica.checkpointer.open()
    assert await replica.checkpointer.load(20) is None and replica.checkpointer.versions == (10,)
    (warning,) = replica.of("checkpoint_bad")
    assert "not the owner's" in str(warning["reason"])


async def filled(disk: SimulatedDisk, *cuts: tuple[int, Restart]) -> None:
    for version, restart in cuts:
        header = StateHeader(version, Chain(f"{version:064x}"), Chain("0b" * 32), Chain("00" * 32), restart)
        await disk.write(STAGE, header, Replica.state(version))


async def test_what_an_earlier_process_left_is_verified_and_the_bad_one_named(disk: Watched) -> None:
    await filled(disk, (10, NO_RESTART), (20, NO_RESTART), (30, NO_RESTART))
    disk.spoil(STAGE, 30)
    replica = Replica(disk)
    assert await replica.checkpointer.open() == (10, 20)
    (warning,) = replica.of("checkpoint_bad")
    assert warning["path"] == "simulated/stage-1-step-30" and warning["reason"] == "altered"
    assert warning["then"] == "it is not used; the newest one here that is sound is step 20"
    found = await replica.checkpointer.load(20)
    assert found is not None
    info, data = found
    assert info.version == 20 and bytes(data) == b"state 20" and not replica.checkpointer.all_damaged
    disk.spoil(STAGE, 10)
    disk.spoil(STAGE, 20)
    again = Replica(disk)
    assert await again.checkpointer.open() == () and again.checkpointer.all_damaged


async def test_one_that_spoils_later_is_named_when_it_is_loaded_and_announced_no_more(disk: Watched) -> None:
    await filled(disk, (10, NO_RESTART), (20, NO_RESTART))
    replica = Replica(disk)
    await replica.checkpointer.open()
    disk.spoil(STAGE, 20)
    assert await replica.checkpointer.load(20) is None and replica.checkpointer.versions == (10,)
    (warning,) = replica.of("checkpoint_bad")
    assert warning["path"] == "simulated/stage-1-step-20" and warning["reason"] == "altered"


async def test_going_back_gives_up_what_came_after_and_the_next_write_deletes_it(disk: Watched) -> None:
    await filled(disk, (10, NO_RESTART), (20, NO_RESTART), (30, NO_RESTART))
    replica = Replica(disk, keep=9)
    await replica.checkpointer.open()
    replica.checkpointer.stand_under(Restart(1, 10))
    assert replica.checkpointer.versions == (10,)
    assert written(disk) == [10, 20, 30], "not before there is something newer"
    replica.version, replica.restart = 10, Restart(1, 10)
    async with replica.running():
        await replica.train(11)
    assert written(disk) == [10, 20] == list(replica.checkpointer.versions)
    assert disk.files[STAGE, 20][0].on_disk.restart == Restart(1, 10)


async def test_the_disk_remembers_a_restart_when_everybody_has_forgotten(disk: Watched) -> None:
    await filled(disk, (10, NO_RESTART), (20, NO_RESTART), (30, NO_RESTART), (15, Restart(2, 10)))
    replica = Replica(disk)
    assert await replica.checkpointer.open() == (10, 15)
    assert replica.checkpointer.restart == Restart(2, 10)


async def test_a_later_restart_that_only_the_disk_remembers_does_not_count(disk: Watched) -> None:
    await filled(disk, (10, NO_RESTART), (20, NO_RESTART), (30, NO_RESTART), (15, Restart(2, 10)))
    replica = Replica(disk)
    assert await replica.checkpointer.open() == (10, 15)
    replica.checkpointer.stand_under(Restart(1, 20))
    assert replica.checkpointer.versions == (10, 20) and replica.checkpointer.restart == Restart(1, 20)


async def test_the_state_gone_on_from_is_written_again_under_its_restart(disk: Watched) -> None:
    await filled(disk, (10, NO_RESTART))
    replica = Replica(disk)
    await replica.checkpointer.open()
    replica.version, replica.restart = 10, Restart(1, 10)
    replica.checkpointer.stand_under(replica.restart)
    async with replica.running():
        replica.checkpointer.reached()
        await asyncio.sleep(1.0)
    assert disk.files[STAGE, 10][0].on_disk.restart == Restart(1, 10) == replica.checkpointer.restart


# ---------------------------------------------------------------- a real directory


def in_directory(tmp_path: Path, story: Callable[[Replica, CheckpointStore], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        store = CheckpointStore(tmp_path, RUN)
        await story(Replica(DirectoryDisk(store), keep=2), store)

    asyncio.run(whole())


async def reach(replica: Replica, version: int) -> Written:
    replica.version = version
    result = await replica.checkpointer.write_now()
    assert result is not None
    return result


def test_in_a_directory(tmp_path: Path) -> None:
    async def story(replica: Replica, store: CheckpointStore) -> None:
        store.folder.mkdir(parents=True)
        (store.folder / ".stage-1-step-9.json.tmp").write_text("half")
        assert await replica.checkpointer.open() == ()
        replica.common = 30
        for version in (10, 20, 30, 40):
            assert (await reach(replica, version)).problem is None
        store.info_path(STAGE, 40).unlink()
        (store.folder / "stage-1-step-2.safetensors").write_bytes(b"a half")
        await reach(replica, 50)
        assert sorted(path.name for path in store.folder.iterdir()) == [
            "stage-1-step-30.json",
            "stage-1-step-30.safetensors",
            "stage-1-step-40.safetensors",
            "stage-1-step-50.json",
            "stage-1-step-50.safetensors",
        ]
        assert replica.checkpointer.path(50) == str(store.data_path(STAGE, 50))

    in_directory(tmp_path, story)


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    async def story(replica: Replica, store: CheckpointStore) -> None:
        store.folder.parent.mkdir(parents=True)
        store.folder.write_text("a file in the way")
        assert await replica.checkpointer.open() == ()
        result = await reach(replica, 10)
        assert result.problem == "File exists"
        assert [event for event, _ in replica.events] == ["checkpoint_bad", "checkpoint_failed"]

    in_directory(tmp_path, story)


def test_old_checkpoints_that_cannot_be_deleted_do_not_spoil_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(replica: Replica, store: CheckpointStore) -> None:
        def refuse(self: CheckpointStore, stage: int, versions: Collection[int]) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(CheckpointStore, "retain", refuse)
        for version in (11, 12, 13, 14):
            result = await reach(replica, version)
        problem = "older checkpoints cannot be deleted: Operation not permitted"
        assert result.problem is None and replica.of("checkpoint")[-1]["problem"] == problem
        assert 14 in replica.checkpointer.versions

    in_directory(tmp_path, story)


def test_a_write_that_was_given_up_and_the_next_are_not_at_it_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling what waits for a thread does not stop the thread."""
    began, go_on = threading.Event(), threading.Event()
    inside: list[int] = []
    write = CheckpointStore.write

    def slow(self: CheckpointStore, info: Any, data: Any) -> None:
        inside.append(info.version)
        assert len(inside) == 1, "two writes at once"
        began.set()
        assert go_on.wait(30)
        write(self, info, data)
        inside.remove(info.version)

    monkeypatch.setattr(CheckpointStore, "write", slow)

    async def story(replica: Replica, store: CheckpointStore) -> None:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(reach(replica, 10))
            await asyncio.to_thread(began.wait, 30)
            first.cancel()
            second = group.create_task(reach(replica, 11))
            await asyncio.sleep(0)
            go_on.set()
        assert second.result().problem is None
        assert [info.version for info in store.found(STAGE, through=True).good] == [
            11
        ]  # 10 was never known to be there

    in_directory(tmp_path, story)
