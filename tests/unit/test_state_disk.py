"""Checkpoints on disk: whole, or named as bad, or absent - and never another run's."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarmnet.errors import BadCheckpoint
from swarmnet.ids import NO_RESTART, Chain, PeerId, Restart, RunId
from swarmnet.manifest.extension import Extension
from swarmnet.messages import Exclusion, StateHeader
from swarmnet.net.identity import Identity
from swarmnet.state import disk
from swarmnet.state.disk import MAX_JSON_BYTES, CheckpointInfo, CheckpointStore
from swarmnet.wire.signed import sign, to_text

ONE, OTHER = RunId("a1" * 32), RunId("b2" * 32)
STAGE = 2


def header_at(version: int, restart: Restart = NO_RESTART) -> StateHeader:
    chains = Chain(f"{version:064x}"), Chain("0b" * 32), Chain("0c" * 32)
    return StateHeader(version, *chains, restart, (), (Exclusion(PeerId("P"), version + 32, 1),))


def data_of(version: int) -> bytes:
    return hashlib.sha256(str(version).encode()).digest() * 7


def put(store: CheckpointStore, version: int, stage: int = STAGE) -> CheckpointInfo:
    info = store.describe(stage, header_at(version), data_of(version))
    store.write(info, data_of(version))
    return info


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, ONE, numerics="cpu/torch-2.13/1")


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_what_was_written_is_found_and_loaded(store: CheckpointStore) -> None:
    header = header_at(40, Restart(3, 20))
    info = store.describe(STAGE, header, data_of(40))
    store.write(info, memoryview(data_of(40)))
    assert store.found(STAGE, through=True) == disk.Found(good=(info,))
    found, data = store.load(STAGE, 40)
    assert (found, found.header, bytes(data)) == (info, header, data_of(40))
    assert (info.numerics, info.sha256) == ("cpu/torch-2.13/1", hashlib.sha256(data_of(40)).hexdigest())
    assert names(store) == ["stage-2-step-40.json", "stage-2-step-40.safetensors"]


def test_found_is_in_order_and_of_one_stage(store: CheckpointStore) -> None:
    for version, stage in [(100, STAGE), (9, STAGE), (50, 1), (50, STAGE), (60, 22)]:
        put(store, version, stage)
    assert [info.version for info in store.found(STAGE).good] == [9, 50, 100]
    assert store.found(7) == disk.Found()


def test_nothing_is_there_at_first(store: CheckpointStore) -> None:
    assert store.found(STAGE) == store.found(STAGE, through=True) == disk.Found()
    store.clean(STAGE)
    with pytest.raises(BadCheckpoint, match=r"stage-2-step-4\.json: missing"):
        store.load(STAGE, 4)


def test_two_runs_in_one_directory_do_not_meet(tmp_path: Path) -> None:
    stores = [CheckpointStore(tmp_path, run) for run in (ONE, OTHER)]
    put(stores[0], 200)
    assert stores[1].found(STAGE) == disk.Found()
    put(stores[1], 100)
    assert [info.version for info in stores[0].found(STAGE).good] == [200]
    path = stores[0].data_path(0, 200)
    assert path.relative_to(tmp_path) == Path("snapshots/a1a1a1a1a1a1/stage-0-step-200.safetensors")


# ---------------------------------------------------------------- what is wrong is named


def truncated(store: CheckpointStore) -> None:
    os.truncate(store.data_path(STAGE, 50), 100)


def flipped(store: CheckpointStore) -> None:
    raw = bytearray(store.data_path(STAGE, 50).read_bytes())
    raw[-1] ^= 1
    store.data_path(STAGE, 50).write_bytes(raw)


def grown(store: CheckpointStore) -> None:
    with store.data_path(STAGE, 50).open("ab") as file:
        file.write(b"x")


def no_data(store: CheckpointStore) -> None:
    store.data_path(STAGE, 50).unlink()


def no_json(store: CheckpointStore) -> None:
    store.info_path(STAGE, 50).unlink()


def data_is_a_link(store: CheckpointStore) -> None:
    path = store.data_path(STAGE, 50)
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def json_is_a_link(store: CheckpointStore) -> None:
    path = store.info_path(STAGE, 50)
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def json_is_a_pipe(store: CheckpointStore) -> None:
    store.info_path(STAGE, 50).unlink()
    os.mkfifo(store.info_path(STAGE, 50))


def data_is_a_folder(store: CheckpointStore) -> None:
    store.data_path(STAGE, 50).unlink()
    store.data_path(STAGE, 50).mkdir()


def json_says(**changes: object) -> Callable[[CheckpointStore], None]:
    def spoil(store: CheckpointStore) -> None:
        path = store.info_path(STAGE, 50)
        fields = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))

    return spoil


def json_is(text: bytes) -> Callable[[CheckpointStore], None]:
    return lambda store: store.info_path(STAGE, 50).write_bytes(text) and None


def renamed(store: CheckpointStore) -> None:
    for kind in (store.data_path, store.info_path):
        kind(STAGE, 49).rename(kind(STAGE, 50))


BAD = {
    "truncated": (truncated, "torn: 100 bytes where its JSON promises 224", ".safetensors"),
    "flipped byte": (flipped, "altered: SHA-256", ".safetensors"),
    "grown": (grown, "torn: 225 bytes", ".safetensors"),
    "no data": (no_data, "missing", ".safetensors"),
    "no json": (no_json, "missing", ".json"),
    "data is a link": (data_is_a_link, "symbolic link", ".safetensors"),
    "json is a link": (json_is_a_link, "symbolic link", ".json"),
    "json is a pipe": (json_is_a_pipe, "not a regular file", ".json"),
    "data is a folder": (data_is_a_folder, "directory|regular", ".safetensors"),
    "another run": (json_says(run=OTHER), "of another run", ".json"),
    "another stage": (json_says(stage=1), "speaks of stage 1, step 50", ".json"),
    "another version": (json_says(version=51), "speaks of stage 2, step 51", ".json"),
    "renamed": (renamed, "speaks of stage 2, step 49", ".json"),
    "later format": (json_says(format=2), "format: ", ".json"),
    "unknown field": (json_says(spell="abracadabra"), "spell: ", ".json"),
    "field missing": (json_says(chain=None), "chain: ", ".json"),
    "wrong type": (json_says(num_bytes="224"), "num_bytes: ", ".json"),
    "negative size": (json_says(num_bytes=-1), "num_bytes: ", ".json"),
    "huge size": (json_says(num_bytes=2**62), "num_bytes: ", ".json"),
    "large size": (json_says(num_bytes=2**50), "torn: 224 bytes", ".safetensors"),
    "digest of another": (json_says(sha256="00" * 32), "altered", ".safetensors"),
    "digest is no hex": (json_says(sha256="zz" * 32), "sha256: ", ".json"),
    "foreign json": (json_is(b"[1, 2]"), "not a checkpoint's JSON", ".json"),
    "no json at all": (json_is(b"\xff\x00garbage"), "not a checkpoint's JSON", ".json"),
    "empty json": (json_is(b""), "not a checkpoint's JSON", ".json"),
    "deep json": (json_is(b"[" * 60_000), "not a checkpoint's JSON", ".json"),
    "huge json": (json_is(b" " * (MAX_JSON_BYTES + 1)), "not a checkpoint's JSON", ".json"),
}


@pytest.mark.parametrize(("spoil", "words", "ending"), BAD.values(), ids=BAD)
def test_a_bad_checkpoint_is_named_and_the_others_stay(
    store: CheckpointStore, spoil: Callable[[CheckpointStore], None], words: str, ending: str
) -> None:
    put(store, 50)
    put(store, 49)
    spoil(store)
    good = put(store, 40)
    found = store.found(STAGE, through=True)
    assert good in found.good and 50 not in [info.version for info in found.good]
    (error,) = (error for error in found.bad if "step-50" in error.path)
    assert error.path == str(store.folder / f"stage-2-step-50{ending}")
    with pytest.raises(BadCheckpoint, match=words):
        raise error
    with pytest.raises(BadCheckpoint):
        store.load(STAGE, 50)
    assert bytes(store.load(STAGE, 40)[1]) == data_of(40)


@pytest.mark.parametrize("spoil", [entry[0] for entry in BAD.values() if entry[0] is not data_is_a_folder])
def test_a_bad_checkpoint_can_be_written_again(
    store: CheckpointStore, spoil: Callable[[CheckpointStore], None]
) -> None:
    put(store, 50)
    put(store, 49)
    spoil(store)
    info = put(store, 50)
    assert info in store.found(STAGE, through=True).good and bytes(store.load(STAGE, 50)[1]) == data_of(50)


def test_names_that_are_not_ours_are_nobodys_business(store: CheckpointStore) -> None:
    put(store, 5)
    for name in (
        "stage-2-step-05.json",
        "stage-2-step-x.json",
        "stage-2-step-6.json.bak",
        "notes.txt",
        f"stage-2-step-{'9' * 40}.json",
    ):
        (store.folder / name).write_text("{}")
    assert [info.version for info in store.found(STAGE).good] == [5] and not store.found(STAGE).bad


def test_a_folder_that_cannot_be_listed_is_named(store: CheckpointStore) -> None:
    store.folder.parent.mkdir(parents=True)
    store.folder.write_text("a file in the way")
    (error,) = store.found(STAGE).bad
    assert error.path == str(store.folder) and "listed" in error.reason


# ---------------------------------------------------------------- writing is all or nothing

CALLS = [
    (call, nth)
    for call, most in (
        ("os.fsync", 6),
        ("pathlib.Path.replace", 3),
        ("pathlib.Path.open", 3),
        ("pathlib.Path.unlink", 7),
    )
    for nth in range(most)
]


def fail(patch: pytest.MonkeyPatch, call: str, nth: int) -> None:
    """The n-th call of one kind fails for want of space."""
    module: object = os if call.startswith("os.") else Path
    name = call.rpartition(".")[2]
    real, calls = getattr(module, name), iter(range(100))

    def full(*args: object, **kwargs: object) -> object:
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    patch.setattr(module, name, full)


@pytest.mark.parametrize(("call", "nth"), CALLS)
def test_a_write_that_fails_anywhere_leaves_no_lie(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    """50 is then the old one, the new one, absent or bad: never wrong."""
    put(store, 40)
    put(store, 50)
    new = store.describe(STAGE, header_at(50), b"new" * 100)
    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        fail(patch, call, nth)
        store.write(new, b"new" * 100)
    for info in store.found(STAGE, through=True).good:
        expected = (b"new" * 100,) if info == new else (data_of(info.version),)
        assert bytes(store.load(STAGE, info.version)[1]) in expected
    assert bytes(store.load(STAGE, 40)[1]) == data_of(40)
    store.clean(STAGE)
    assert not [name for name in names(store) if name.endswith(".tmp")]
    store.write(new, b"new" * 100)
    assert bytes(store.load(STAGE, 50)[1]) == b"new" * 100


def test_data_are_synced_before_the_json_that_vouches_for_them(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    story: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def sync(handle: int) -> None:
        story.append("sync " + Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def rename(source: Path, target: Path) -> Path:
        story.append(f"rename {target.name}")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    put(store, 5)
    data, told, folder = "stage-2-step-5.safetensors", "stage-2-step-5.json", store.folder.name
    assert story == [
        f"sync .{data}.tmp",
        f"rename {data}",
        f"sync {folder}",
        f"sync .{told}.tmp",
        f"rename {told}",
        f"sync {folder}",
    ]


@pytest.mark.parametrize(("call", "nth"), CALLS)
def test_the_state_a_run_went_back_to_is_never_absent(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    """It is written again under its restart by everybody at once, and may be the only one that all stages have."""
    old = put(store, 50)
    new = store.describe(STAGE, header_at(50, Restart(1, 50)), data_of(50))
    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        fail(patch, call, nth)
        store.write(new, data_of(50))
    (found,) = store.found(STAGE, through=True).good
    assert found in (old, new) and bytes(store.load(STAGE, 50)[1]) == data_of(50)
    store.write(new, data_of(50))
    assert store.found(STAGE, through=True).good == (new,)


def test_what_a_crash_left_is_cleaned_for_the_own_stage_only(store: CheckpointStore) -> None:
    put(store, 5)
    for name in (".stage-2-step-7.safetensors.tmp", ".stage-2-step-7.json.tmp", ".stage-22-step-7.json.tmp"):
        (store.folder / name).write_bytes(b"half")
    store.clean(STAGE)
    assert names(store) == [".stage-22-step-7.json.tmp", "stage-2-step-5.json", "stage-2-step-5.safetensors"]
    (store.folder / ".stage-2-step-5.json.tmp").write_bytes(b"half")
    put(store, 5)  # what a write left behind is not in the way of the next


def test_leftovers_below_what_is_kept_go_and_newer_ones_stay(store: CheckpointStore) -> None:
    for version in (10, 20, 30, 40):
        put(store, version)
    no_json_of = [10, 40]
    for version in no_json_of:
        store.info_path(STAGE, version).unlink()
    store.retain(STAGE, [30])
    assert [info.version for info in store.found(STAGE).good] == [30]
    assert [Path(error.path).name for error in store.found(STAGE).bad] == ["stage-2-step-40.json"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "swarmnet-test", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this root may not mount a tmpfs (a container without CAP_SYS_ADMIN)")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    store = CheckpointStore(tiny_disk, ONE)
    small, large = bytes(300_000), bytes(900_000)
    first = store.describe(STAGE, header_at(1), small)
    store.write(first, small)
    with pytest.raises(OSError) as caught:
        store.write(store.describe(STAGE, header_at(2), large), large)
    assert caught.value.errno == errno.ENOSPC
    assert store.found(STAGE, through=True) == disk.Found(good=(first,))
    assert names(store) == ["stage-2-step-1.json", "stage-2-step-1.safetensors"]
    store.retain(STAGE, [])
    store.write(store.describe(STAGE, header_at(2), large), large)
    assert [info.version for info in store.found(STAGE, through=True).good] == [2]


EARLIER = """{
 "format": 1, "run": "%s", "stage": 2, "version": 7, "chain": "%s", "before": "%s", "term_chain": "%s",
 "restart_number": 1, "restart_version": 5, "num_bytes": 7, "sha256": "%s", "numerics": "cpu/torch-2.13/1",
 "written_at": "2026-11-01T10:00:00+00:00", "owner": "12D3KooWmine", "owed_bytes": 4, "owed_sha256": "%s",
 "notices": []
}
"""
"""As peers wrote it while a third file held what the averaging codec had yet to send."""


def test_a_checkpoint_of_an_earlier_release_loads(store: CheckpointStore) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
    store.folder.mkdir(parents=True)
    store.data_path(STAGE, 7).write_bytes(b"weights")
    store.data_path(STAGE, 7).with_suffix(".owed").write_bytes(b"owed")
    store.info_path(STAGE, 7).write_text(EARLIER % (ONE, "0a" * 32, "0b" * 32, "0c" * 32, digest, digest))
    assert store.found(STAGE, through=True).bad == ()
    info, data = store.load(STAGE, 7)
    assert info.header == StateHeader(7, Chain("0a" * 32), Chain("0b" * 32), Chain("0c" * 32), Restart(1, 5))
    assert bytes(data) == b"weights"
    store.retain(STAGE, [])
    assert names(store) == []


@pytest.mark.parametrize("earlier", [False, True])
def test_notices_in_a_checkpoint_are_read_or_named(store: CheckpointStore, earlier: bool) -> None:
    owner, digest = Identity.generate(), hashlib.sha256(b"weights").hexdigest()
    notice = sign(Extension(RunId(ONE), 1, 5, 90), owner.peer, owner.sign)
    text = f"extension:{ONE}:{owner.peer}:1:5:90:{'ab' * 64}" if earlier else to_text(notice)
    store.folder.mkdir(parents=True)
    store.data_path(STAGE, 7).write_bytes(b"weights")
    said = EARLIER.replace('"notices": []', f'"notices": ["{text}"]')
    store.info_path(STAGE, 7).write_text(said % (ONE, "0a" * 32, "0b" * 32, "0c" * 32, digest, digest))
    if not earlier:
        assert store.load(STAGE, 7)[0].header.notices == (notice,)
        return
    (bad,) = store.found(STAGE, through=True).bad
    assert "notices: 0: Value error, signed for an earlier version, and only that reads it" in str(bad)
