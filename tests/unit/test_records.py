"""Records: what is sealed comes back, and nothing else does."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.bounds import ANY_RUN
from swarmnet.directory import (
    MAX_ADDRESSES,
    MAX_ON_DISK,
    MAX_STAGES_PER_PEER,
    Complaint,
    DisputedWork,
    Invitation,
    Record,
    StageStatus,
    TaintedStep,
)
from swarmnet.errors import BadMessage, RejectCode, UsageError
from swarmnet.ids import Chain, OnDisk, PeerId, Restart, RunId, first_chain
from swarmnet.net.identity import Identity, verify
from swarmnet.net.records import (
    MAX_AHEAD_S,
    TRAINERS,
    WHOLE_RUN,
    Announcement,
    RecordTable,
    agreed_num_stages,
    dht_key,
    left_out,
    places_of,
    seal,
    unseal,
)
from swarmnet.peer.swarm_health import LossAt, assess
from swarmnet.statement import signed_statement
from swarmnet.wire import signed as signing
from swarmnet.wire.fields import struct_of
from swarmnet.wire.signed import MAX_SIGNED_BYTES

NOW = 1_800_000_000.0
RUN = RunId("ab" * 32)
ME = Identity.from_bytes(Identity.generate().to_bytes())
OTHER = Identity.generate()
DHT = f"/ip4/127.0.0.1/tcp/4001/p2p/{ME.peer}"


def status(stage: int, version: int = 7) -> StageStatus:
    return StageStatus(stage, version, first_chain(RUN, stage), synced=True, queue=1, slots=4)


def record(*stages: int, who: Identity = ME, **changes: object) -> Record:
    at = ("/ip4/127.0.0.1/tcp/4000",)
    plain = Record(RUN, who.peer, 5, at, tuple(map(status, stages)), numerics="cpu", loss=(6, 2.5))
    return replace(plain, **changes)


def announcement(*stages: int, ahead_s: float = 30.0, **changes: object) -> Announcement:
    mine = record(*(stages or (0,)), **changes)
    return Announcement(mine, places_of(mine)[0], int((NOW + ahead_s) * 1000), 4, (DHT,))


def forged(fill: Callable[[Any], object] = lambda message: None, *, by: Identity = ME, kind: str = "") -> bytes:
    """Well signed bytes whose fields nobody checked before signing. fill: changes the message."""
    sealed = signing.from_bytes(seal(announcement(), ME.sign), Announcement)
    message = struct_of(Announcement, ANY_RUN).message.FromString(sealed.payload)
    fill(message)
    payload, kind = message.SerializeToString(), kind or sealed.kind
    signature = by.sign(signed_statement(kind, payload, sealed.key, sealed.not_after))
    return signing.to_bytes(replace(sealed, kind=kind, payload=payload, signature=signature))


finite = st.floats(-1e30, 1e30)
counts = st.integers(0, 2**31)
statuses = st.builds(
    StageStatus,
    stage=st.integers(0, 1023),
    version=st.integers(0, 2**53),
    chain=st.binary(min_size=32, max_size=32).map(lambda raw: Chain(raw.hex())),
    synced=st.booleans(),
    queue=counts,
    slots=counts,
    disk=st.lists(st.builds(OnDisk, st.integers(0, 2**53), st.builds(Restart, counts, counts)), max_size=8).map(tuple),
    drift=st.none() | st.integers(0, 2**53),
    stray=st.booleans(),
)
ports = st.integers(1, 65535)
addresses = st.one_of(
    st.builds("/ip4/{}/tcp/{}".format, st.ip_addresses(v=4), ports),
    st.builds("/ip6/{}/tcp/{}".format, st.ip_addresses(v=6), ports),
    st.builds("/dns4/{}/tcp/{}".format, st.from_regex(r"[a-z]{1,20}(\.[a-z]{1,9})?", fullmatch=True), ports),
)
records = st.builds(
    Record,
    run=st.just(RUN),
    peer=st.just(ME.peer),
    invitation=st.none()
    | st.builds(
        lambda guest: signing.sign(Invitation(RUN, guest, ("stage",)), OTHER.peer, OTHER.sign, not_after=9),
        st.just(ME.peer),
    ),
    incarnation=st.integers(0, 2**64 - 1),
    addresses=st.lists(addresses, max_size=4).map(tuple),
    stages=st.lists(statuses, min_size=1, max_size=8, unique_by=lambda s: s.stage).map(tuple),
    trainer=st.booleans(),
    numerics=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60),
    loss=st.none() | st.tuples(st.integers(0, 2**53), finite),
    eval_loss=st.none() | st.tuples(st.integers(0, 2**53), finite),
    tokens_per_second=st.floats(0, 1e15),
    finished=st.booleans(),
    halted=st.none() | st.integers(0, 2**53),
    restart=st.builds(Restart, st.integers(0, 2**53), st.integers(0, 2**53)),
    wants=st.builds(Restart, st.integers(0, 2**53), st.integers(0, 2**53)),
    complaints=st.lists(
        st.builds(
            Complaint,
            st.integers(0, 1023),
            st.just(OTHER.peer),
            st.sampled_from(("waited_for", "unreached", "sits_out", "left_out")),
            st.text("abc ", max_size=80),
            counts,
        ),
        max_size=3,
    ).map(tuple),
    tainted=st.lists(st.builds(TaintedStep, st.integers(0, 1023), st.integers(0, 2**53)), max_size=4).map(tuple),
    num_tainted=st.integers(0, 2**53),
    disputed=st.none() | st.builds(DisputedWork, st.integers(0, 1023), st.integers(0, 2**53), st.just(OTHER.peer)),
    num_disputed=st.integers(0, 2**53),
    nickname=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=32),
)


@given(records, st.data())
def test_every_record_survives_the_round_trip(original: Record, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(places_of(original)))
    sent = Announcement(original, place, int(NOW * 1000) + 1, 1024, (DHT,))
    assert unseal(seal(sent, ME.sign), now=NOW) == sent


@given(st.binary(max_size=MAX_SIGNED_BYTES + 10))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        unseal(data, now=NOW)


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_any_payload_gives_a_record_or_a_refusal(data: bytes, at: int) -> None:
    def fill(message: Any) -> None:
        whole = message.SerializeToString()
        message.Clear()
        with contextlib.suppress(DecodeError):
            message.ParseFromString(whole[:at] + data + whole[at + len(data) :])

    try:
        found = unseal(forged(fill), now=NOW)
    except BadMessage:
        return
    assert unseal(seal(found, ME.sign), now=NOW) == found  # whatever passes is something we would say ourselves


@given(st.data())
def test_a_flipped_bit_is_noticed(data: st.DataObject) -> None:
    sealed = bytearray(seal(announcement(), ME.sign))
    at = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[at // 8] ^= 1 << at % 8
    with pytest.raises(BadMessage):
        unseal(bytes(sealed), now=NOW)


def filled(**fields: object) -> Callable[[Any], None]:
    """Sets fields of the record in an announcement, or of the announcement."""

    def fill(message: Any) -> None:
        for name, value in fields.items():
            target = message.record if name in message.record.DESCRIPTOR.fields_by_name else message
            field = target.DESCRIPTOR.fields_by_name[name]
            if field.is_repeated or field.message_type is not None:
                target.ClearField(name)
            made = target.__class__(**{name: value})
            target.MergeFrom(made) if field.is_repeated or field.message_type else setattr(target, name, value)

    return fill


NAN, STAGE = float("nan"), {"chain": bytes(32), "synced": True}
COMPLAINT = {"stage": 0, "peer": OTHER.peer, "how": "left_out", "reason": "late"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"place": "1"}, "which it does not claim"),
        ({"place": TRAINERS}, "which it does not claim"),
        ({"place": ""}, "which it does not claim"),
        ({"peer": OTHER.peer, "dht": []}, "not signed by its peer"),
        ({"peer": "12D3KooW" + "0" * 44, "dht": []}, "no peer id"),
        ({"loss": {"step": 3, "loss": NAN}}, "record.loss.loss is nan"),
        ({"tokens_per_second": float("inf")}, "tokens_per_second is inf"),
        ({"tokens_per_second": 1e300}, "tokens_per_second is 1e+300"),
        ({"run": bytes(31)}, "run has 31 bytes"),
        ({"steps": -1}, "steps is -1"),
        ({"addresses": ["/ip4/127.0.0.1/udp/1"]}, "neither a TCP port"),
        ({"addresses": ["/ip4/127.0.0.1/tcp/99999"]}, "neither a TCP port"),
        ({"addresses": ["/dns4/" + "a" * 60 + "!/tcp/1"]}, "not a host name"),
        ({"addresses": ["/dns4/" + "a" * 60 + ".-/tcp/1"]}, "not a host name"),
        ({"addresses": [f"/ip4/127.0.0.1/tcp/1/p2p/{OTHER.peer}"]}, "names another peer"),
        ({"addresses": ["/ip4/127.0.0.1/tcp/1"] * 9}, "addresses has 9 entries"),
        ({"dht": ["/ip4/127.0.0.1/tcp/1"]}, "DHT address without its peer id"),
        ({"stages": [{"stage": 4, **STAGE}], "place": "4"}, "names a stage that the run of 4 stages"),
        ({"stages": [STAGE] * 2}, "names a stage twice"),
        ({"parts": [0, 1]}, "parts of others than its stages"),
        ({"num_stages": 10**9}, "num_stages is 1000000000"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"numerics": "\x1b[31m"}, "other than printable"),
        ({"nickname": "\x1b[31m"}, "other than printable"),
        ({"nickname": "\u202egpj"}, "other than printable"),
        ({"nickname": "a" * 33}, "nickname has 33 characters"),
        ({"complaints": [{**COMPLAINT, "reason": "\x1b[2J"}]}, "other than printable"),
        ({"complaints": [{**COMPLAINT, "how": "hated"}]}, "no word that is known"),
        ({"complaints": [COMPLAINT] * 9}, "complaints has 9 entries"),
        ({"tainted": [{"step": 3}] * 5}, "tainted has 5 entries"),
        ({"tainted": [{"stage": 1000}]}, "names a stage that"),
        ({"disputed": {"stage": 1000, "peer": OTHER.peer}}, "names a stage that"),
        ({"disputed": {"peer": "nobody"}}, "no peer id"),
    ],
)
def test_each_rule_has_its_refusal(fields: dict[str, object], why: str) -> None:
    with pytest.raises(BadMessage, match=re.escape(why)):
        unseal(forged(filled(**fields)), now=NOW)


def test_what_a_later_minor_version_adds_is_passed_over() -> None:
    """Its signature covers that, too."""
    later = b"\xfa\x3f\x04mood"  # field 1023
    assert unseal(forged(lambda message: message.record.MergeFromString(later)), now=NOW) == unseal(forged(), now=NOW)


def test_a_signature_of_one_kind_is_none_of_another() -> None:
    sealed = signing.from_bytes(seal(announcement(), ME.sign), Announcement)
    assert sealed.is_genuine(verify)
    for other in (
        replace(sealed, kind="Record"),
        replace(sealed, not_after=sealed.not_after + 1),
        replace(sealed, payload=sealed.payload + b"\x20\x05"),
        replace(sealed, key=OTHER.peer),
    ):
        assert not other.is_genuine(verify)
    with pytest.raises(BadMessage, match="kind is 'Record', not Announcement"):
        unseal(forged(kind="Record"), now=NOW)


def test_nothing_is_added_to_an_envelope() -> None:
    sealed = seal(announcement(), ME.sign)
    for more in (b"\xfa\x3f\x04mood", b"\x20\x00", sealed[-66:]):
        with pytest.raises(BadMessage, match="more in its envelope than is signed"):
            unseal(sealed + more, now=NOW)


def test_none_and_zero_are_not_the_same() -> None:
    for step in (None, 0):
        assert unseal(seal(announcement(halted=step, going=step), ME.sign), now=NOW).record.halted == step


def test_only_the_peer_itself_can_announce_it() -> None:
    with pytest.raises(BadMessage) as refusal:
        unseal(forged(by=OTHER), now=NOW)
    assert refusal.value.code is RejectCode.UNKNOWN_IDENTITY


def test_size_is_checked_before_parsing() -> None:
    with pytest.raises(BadMessage) as refusal:
        unseal(b"x" * (MAX_SIGNED_BYTES + 1), now=NOW)
    assert refusal.value.code is RejectCode.TOO_LARGE


def test_expired_and_far_future_records_are_refused() -> None:
    for ahead_s, ok in ((1, True), (MAX_AHEAD_S, True), (MAX_AHEAD_S + 1, False), (0, False), (-5, False)):
        sealed = seal(announcement(ahead_s=ahead_s), ME.sign)
        if ok:
            unseal(sealed, now=NOW)
        else:
            with pytest.raises(BadMessage) as refusal:
                unseal(sealed, now=NOW)
            assert refusal.value.code is RejectCode.CLOCK
    unseal(seal(announcement(ahead_s=-5), ME.sign), now=NOW, grace_s=10)
    with pytest.raises(BadMessage, match="too far ahead"):
        unseal(seal(replace(announcement(), expiry_ms=0), ME.sign), now=NOW)  # no end


def test_an_ordinary_record_is_below_a_kilobyte() -> None:
    assert len(seal(announcement(3, numerics="cpu/torch-2.13/1"), ME.sign)) < 1024


def test_whom_most_others_of_its_stage_complain_of_is_left_out() -> None:
    who = [Identity.generate() for _ in range(4)]
    lost = who[3].peer

    def said(*hows: str, stage: int = 0) -> frozenset[PeerId]:
        complaints = [(Complaint(stage, lost, how, "is not heard"),) * 2 for how in hows]  # twice is one voice
        return left_out(
            [record(0, who=one, complaints=of) for one, of in zip(who, [*complaints, *[()] * 4], strict=False)], 0
        )

    assert said("left_out", "unreached") == {lost}
    assert said("left_out") == said("waited_for", "waited_for", "waited_for") == said("left_out", "left_out", stage=1)
    assert said("left_out") == left_out([record(0), record(1, complaints=(Complaint(0, lost, "left_out", ""),))], 0)
    assert said() == frozenset()


def test_complaints_are_cut_and_give_way_to_what_others_need_to_find_a_peer() -> None:
    many = (Complaint(0, OTHER.peer, "left_out", "late " * 99),) * 99
    said = unseal(seal(announcement(complaints=many), ME.sign), now=NOW).record.complaints
    assert said == (Complaint(0, OTHER.peer, "left_out", f"{('late ' * 15)[:-1]}..."),) * 8
    disk = tuple(OnDisk(10**15, Restart(10**15, 10**15)) for _ in range(MAX_ON_DISK))
    stages = tuple(replace(status(stage % 4), stage=stage, disk=disk) for stage in range(16))
    hosts = tuple(f"/dns4/{'a' * 60}.{'b' * 60}.{'c' * 60}.org/tcp/{4000 + port}" for port in range(MAX_ADDRESSES))
    full = replace(announcement(stages=stages, addresses=hosts), num_stages=16, dht=(DHT,) * MAX_ADDRESSES)
    steps, dispute = (TaintedStep(15, 10**15),) * 4, DisputedWork(15, 10**15, OTHER.peer)
    crowded = replace(full, record=replace(full.record, complaints=many, tainted=steps, disputed=dispute))
    assert unseal(seal(crowded, ME.sign), now=NOW) == unseal(seal(full, ME.sign), now=NOW)


def test_who_announces_circuits_alone_is_hidden() -> None:
    port, circuit = "/ip4/203.0.113.7/tcp/31340", f"/p2p/{OTHER.peer}/p2p-circuit/p2p/{ME.peer}"
    for addresses, hidden in (((circuit,), True), ((port, circuit), False), ((port,), False), ((), False)):
        sent = announcement(addresses=addresses)
        found = unseal(seal(sent, ME.sign), now=NOW).record
        assert found == sent.record and found.hidden == hidden
    with pytest.raises(UsageError):
        seal(announcement(addresses=(f"/p2p/{ME.peer}/p2p-circuit/p2p/{OTHER.peer}",)), ME.sign)


def test_a_record_that_nobody_would_accept_is_not_sealed() -> None:
    for bad in (record(0, addresses=("nowhere",)), record(*range(MAX_STAGES_PER_PEER + 1)), record(9)):
        with pytest.raises(UsageError):
            seal(Announcement(bad, "0", int(NOW * 1000), 4), ME.sign)


def test_a_diverged_run_still_announces_itself() -> None:
    sent = announcement(loss=(3, float("nan")), tokens_per_second=float("inf"))
    found = unseal(seal(sent, ME.sign), now=NOW).record
    assert found.loss is None and found.tokens_per_second == 0.0


def test_a_record_is_announced_under_each_stage_and_as_trainer() -> None:
    assert places_of(record(0, 3, trainer=True)) == ("0", "3", TRAINERS, WHOLE_RUN)
    assert places_of(record(trainer=True)) == (TRAINERS,)
    assert dht_key(RUN, WHOLE_RUN) == f"{RUN[:12]}.run"
    assert dht_key(RUN, "3") == f"{RUN}.stage.3" and dht_key(RUN, TRAINERS) == f"{RUN}.trainers"


def test_the_table_keeps_the_newest_until_it_expires() -> None:
    table = RecordTable(RUN)
    old, new = announcement(ahead_s=10), announcement(ahead_s=20, incarnation=9)
    assert table.offer(new, now=NOW) and not table.offer(old, now=NOW)
    assert not table.offer(replace(new, expiry_ms=new.expiry_ms + 1), now=NOW)  # renewed, nothing new in it
    assert [found.record.incarnation for found in table.fresh(now=NOW + 19)] == [9]
    assert table.fresh(now=NOW + 21) == ()
    assert not table.offer(announcement(run=RunId("cd" * 32)), now=NOW)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), max_size=40))
def test_the_table_is_bounded_and_order_does_not_matter_below_the_bound(offers: list[tuple[int, int]]) -> None:
    def fill(sequence: list[tuple[int, int]], bound: int) -> dict[str, int]:
        table = RecordTable(RUN, max_peers=bound)
        for peer, ahead_s in sequence:
            table.offer(announcement(peer=PeerId(str(peer)), ahead_s=ahead_s), now=NOW)
        return {found.record.peer: found.expiry_ms for found in table.fresh(now=NOW)}

    assert fill(offers, 10) == fill(offers[::-1], 10)
    assert len(fill(offers, 3)) <= 3


def test_the_number_of_stages_is_what_most_say() -> None:
    honest, liar = announcement(), replace(announcement(), num_stages=1000)
    assert agreed_num_stages([honest, liar, honest]) == 4
    assert agreed_num_stages([]) == 0


# ---------------------------------------------------------------- what status makes of them


def kinds(records: list[Record], num_stages: int = 1) -> list[tuple[str, int | None]]:
    return [(problem.kind, problem.stage) for problem in assess(RUN, records, num_stages).problems]


def test_a_healthy_run_has_no_problems() -> None:
    peers = [record(0, 1, who=Identity.generate()) for _ in range(3)]
    trainer = replace(record(who=OTHER), trainer=True, loss=(9, 1.5), eval_loss=(8, 1.75))
    found = assess(RUN, [*peers, trainer], 2)
    assert (found.seen, found.version, found.finished, found.problems) == (True, 7, False, ())
    assert (found.loss, found.eval_loss) == (LossAt(9, 1.5), LossAt(8, 1.75))
    assert [len(line.replicas) for line in found.stages] == [3, 3]


def test_what_looks_wrong_is_named() -> None:
    trainer = replace(record(who=OTHER), trainer=True)
    one, two, three = (Identity.generate() for _ in range(3))
    strayed = replace(status(0), chain=Chain("0" * 64))
    asleep = replace(status(0), synced=False)
    assert kinds([]) == [("nobody_seen", None)]
    assert kinds([trainer]) == [("stage_empty", 0)]
    assert kinds([record(0)]) == [("no_trainer", None), ("single_replica", 0)]
    assert kinds([record(0, finished=True)]) == []  # nothing waits for anybody any more
    assert kinds([record(0, who=one, finished=True), record(0, who=two)]) == []
    assert kinds([trainer, record(stages=(asleep,))]) == [("stage_not_synced", 0), ("single_replica", 0)]
    assert kinds([trainer, record(0, who=one), record(0, who=two)]) == [("two_replicas", 0)]
    others = [record(0, who=one), record(0, who=two, numerics="cuda")]
    assert kinds([trainer, *others, record(who=three, stages=(strayed,))]) == [("fork", 0), ("mixed_numerics", 0)]
    elsewhere = replace(strayed, version=6)
    assert kinds([trainer, *others, record(who=three, stages=(elsewhere,))]) == [("mixed_numerics", 0)]


def test_the_runs_version_is_that_of_its_slowest_stage() -> None:
    ahead = replace(record(), stages=(status(0, version=9),))
    behind = replace(record(who=OTHER), stages=(status(1, version=8), replace(status(0), synced=False, version=3)))
    assert assess(RUN, [ahead, behind], 2).version == 8
    assert assess(RUN, [ahead], 2).version is None


def test_a_peer_that_serves_as_many_stages_as_it_may_can_say_all_of_itself() -> None:
    full = tuple(OnDisk(2**24 + n, Restart(1000, 2**24)) for n in range(MAX_ON_DISK))
    long = tuple(
        replace(status(1000 + n, 2**24), disk=full, executions=2**40, counted=2**40, drift=2**24)
        for n in range(MAX_STAGES_PER_PEER)
    )
    mine = record(0, stages=long, addresses=(f"/dns4/{'a' * 60}.example.org/tcp/40000",) * MAX_ADDRESSES)
    plain = Announcement(mine, str(long[0].stage), int((NOW + 30) * 1000), 1024, (DHT,) * MAX_ADDRESSES)
    assert unseal(seal(plain, ME.sign), now=NOW) == plain


def test_the_bytes_of_a_full_record_are_what_they_were() -> None:
    me, other, chain = Identity.from_seed(b"7" * 32), Identity.from_seed(b"8" * 32), Chain("cd" * 32)
    disk = tuple(OnDisk(n, Restart(n, n + 1)) for n in range(11))
    statuses = (
        StageStatus(2, 41, chain, True, 3, 4, disk, draining=True, executions=9, counted=8, drift=5, stray=True),
        StageStatus(3, 0, chain, False, still_s=3),
    )
    shown = signing.sign(Invitation(RUN, me.peer, ("stage",)), other.peer, other.sign)
    full = Record(
        RUN, me.peer, 1 << 63, ("/ip4/1.2.3.4/tcp/5",), statuses, True, "cpu", (3, 1.5), None, 2.5, True, 7,
        Restart(1, 2), Restart(3, 4), shown, (Complaint(2, other.peer, "left_out", "late " * 40, 3),) * 9,
    )  # fmt: skip
    sealed = seal(Announcement(full, "2", 1_700_000_000_123, 5, (f"/ip4/1.2.3.4/tcp/5/p2p/{me.peer}",)), me.sign)
    assert hashlib.sha256(sealed).hexdigest() == "8f211cc3f46ad8df6e127c54a54a0b526da675323c496fca3d3f700a81771ac8"
