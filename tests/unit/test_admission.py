"""Who is admitted to a run by invitation: what is genuine gets in, and every other way is refused with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.directory import BearerPass, Invitation, Pass, Role
from swarmnet.errors import BadMessage
from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.messages import AuditRequest, Fetch, ManifestRequest, Process, SnapshotRequest, Stamp, TrailRequest
from swarmnet.net import admission
from swarmnet.net.admission import MAX_BANNED, ROLES, Admissions, Bans, role_for
from swarmnet.net.admission_files import Token
from swarmnet.net.identity import Identity, verify
from swarmnet.statement import SignedMessage, signed_statement
from swarmnet.wire.fields import Wrong
from swarmnet.wire.signed import from_bytes, from_text, sign, to_bytes, to_text

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
NOW, END = 1_800_000_000.0, 1_800_003_600
OWNER, ME, OTHER = Identity.generate(), Identity.generate(), Identity.generate()
BEARER = Identity.generate()


def ban(run: RunId, number: int, peers: Iterable[PeerId], by: Identity = OWNER) -> SignedMessage[Bans]:
    return sign(Bans(run, number, tuple(peers)), by.peer, by.sign)


def admissions(**changes) -> Admissions:
    return Admissions(RUN, OWNER.peer, verify, **changes)


def invitation(
    guest: Identity = ME,
    *,
    bearer: bool = False,
    run: RunId = RUN,
    by: Identity = OWNER,
    roles: tuple[Role, ...] = ROLES,
    end: int = END,
    uses: int = 0,
) -> Token:
    terms = Invitation(run, guest.peer, roles, bearer, uses)
    seed = guest.key.private_bytes_raw() if bearer else b""
    return Token(sign(terms, by.peer, by.sign, not_after=end * 1000), seed)


def shown(mine: Token, me: Identity = ME) -> Pass:
    """What `me` makes of an invitation."""
    return mine.shown_by(me)


def refusal(mine: Pass | None, *, peer: PeerId = ME.peer, role: Role | None = "stage", now: float = NOW) -> str:
    """Why a peer that shows this is not admitted; "" if it is."""
    doors = admissions()
    doors.show(peer, mine, now=now)
    assert doors.admitted(peer, role, now=now) == (not doors.why_not(peer, role, now=now))
    return doors.why_not(peer, role, now=now)


roles = st.sets(st.sampled_from(ROLES), min_size=1).map(lambda chosen: tuple(r for r in ROLES if r in chosen))
ends = st.integers(0, 10**11)


@given(st.booleans(), roles, ends, st.integers(0, 1 << 20))
def test_an_invitation_and_its_pass_survive_being_written_and_read(bearer: bool, chosen, end: int, uses: int) -> None:
    most = uses if bearer else 0
    mine = invitation(BEARER if bearer else ME, bearer=bearer, roles=chosen, end=end, uses=most)
    assert Token.parse(f"  {mine.text}\n") == mine and len(mine.text) <= 400
    worn = shown(mine)
    assert from_text(to_text(worn), Invitation, BearerPass) == worn and len(to_text(worn)) <= 640
    if bearer:  # the secret is never shown
        assert mine.text.rsplit(":", 1)[1] not in to_bytes(worn).hex()


@pytest.mark.parametrize("bearer", [False, True], ids=["peer", "bearer"])
def test_whoever_is_invited_is_admitted(bearer: bool) -> None:
    assert refusal(shown(invitation(BEARER if bearer else ME, bearer=bearer))) == ""


@pytest.mark.parametrize("bearer", [False, True], ids=["peer", "bearer"])
def test_all_who_hold_one_bearer_invitation_are_one_guest(bearer: bool) -> None:
    doors = admissions()
    for peer in (ME, OTHER):
        doors.show(peer.peer, shown(invitation(BEARER if bearer else peer, bearer=bearer), peer), now=NOW)
        assert doors.guest(peer.peer) == (BEARER if bearer else peer).peer
    assert doors.guest(OWNER.peer) is None


@pytest.mark.parametrize(
    ("mine", "reason"),
    [
        (None, "has shown no invitation"),
        (shown(invitation(by=OTHER)), "not signed by the run's owner"),
        (shown(invitation(run=OTHER_RUN)), "is to run cdcdcdcdcdcd, not to abababababab"),
        (shown(invitation(run=RunId(RUN[:12] + "0" * 52))), "is to run abababababab, not to"),
        (replace(shown(invitation(by=OTHER)), key=OWNER.peer), "not signed by the run's owner"),
        (invitation(BEARER, bearer=True).invitation, "and not that it holds its key"),
        (shown(invitation(OTHER)), f"made out to {OTHER.peer}"),
        (shown(invitation(end=int(NOW) - 1)), "its invitation ended 2027-01-15 07:59 UTC"),
        (shown(invitation(roles=("trainer",))), "invited as trainer, not as stage"),
        (shown(invitation(BEARER, bearer=True, by=OTHER)), "not signed by the run's owner"),
        (shown(invitation(BEARER, bearer=True), OTHER), "not passed on to it"),
    ],
    ids=[
        "none",
        "another owner",
        "another run",
        "a run that begins alike",
        "forged",
        "a bearer's as its own",
        "another peer",
        "ended",
        "another role",
        "another owner of a bearer's",
        "not passed on",
    ],
)
def test_what_is_not_good_is_refused_with_its_reason(mine: Pass | None, reason: str) -> None:
    assert reason in refusal(mine)


def test_a_bearers_chain_has_two_links_and_no_more() -> None:
    """Neither a key that the owner has not signed passes anything on, nor does a guest that was passed one."""
    genuine = invitation(BEARER, bearer=True).invitation
    for by, key in ((OTHER, OTHER), (OTHER, BEARER)):
        mine = sign(BearerPass(ME.peer, genuine), key.peer, by.sign)
        assert "not passed on" in refusal(mine)
    onwards = sign(Invitation(RUN, ME.peer, ROLES, bearer=True), BEARER.peer, BEARER.sign, not_after=END * 1000)
    mine = sign(BearerPass(OTHER.peer, onwards), ME.peer, ME.sign)
    assert "not signed by the run's owner" in refusal(mine, peer=OTHER.peer)


def test_a_personal_invitation_does_not_pass_for_a_bearers() -> None:
    """Else its guest could let in others."""
    mine = sign(BearerPass(OTHER.peer, invitation(ME).invitation), ME.peer, ME.sign)
    assert "or the other way round" in refusal(mine, peer=OTHER.peer)
    assert "or the other way round" in refusal(sign(mine.value, ME.peer, ME.sign))


def test_a_bearers_invitation_lets_in_as_many_as_it_is_for() -> None:
    doors, letter = admissions(), invitation(BEARER, bearer=True, uses=2)
    crowd = [Identity.generate() for _ in range(3)]
    for _ in range(2):  # those who are in may show it again
        for guest in crowd:
            doors.show(guest.peer, shown(letter, guest), now=NOW)
        assert [doors.admitted(guest.peer, now=NOW) for guest in crowd] == [True, True, False]
    assert "has let in 2 already" in doors.why_not(crowd[2].peer, now=NOW)
    doors.show(crowd[2].peer, shown(invitation(crowd[2])), now=NOW)
    assert doors.admitted(crowd[2].peer, now=NOW)


def test_an_identity_that_is_not_heard_gives_its_use_to_another_one_unless_it_is_banned() -> None:
    doors, letter = admissions(), invitation(BEARER, bearer=True, uses=2, end=END + 10**6)
    gone, calls, late, later = [Identity.generate() for _ in range(4)]
    for guest in (gone, calls):
        doors.show(guest.peer, shown(letter, guest), now=NOW)
    after = NOW + admission.FORGET_S
    doors.check(calls.peer, Fetch(0, 1, 0, "input", cached=False), now=after - 1)
    doors.show(late.peer, shown(letter, late), now=after - 1)
    assert not doors.admitted(late.peer, now=after - 1), "an hour has not passed"
    doors.show(late.peer, shown(letter, late), now=after)
    doors.show(gone.peer, shown(letter, gone), now=after)
    assert [doors.admitted(guest.peer, now=after) for guest in (gone, calls, late)] == [False, True, True]
    assert doors.learn(ban(RUN, 1, [calls.peer]))
    doors.ban_faulty(late.peer)
    doors.show(later.peer, shown(letter, later), now=after + 2 * admission.FORGET_S)
    assert not doors.admitted(later.peer, now=after + 2 * admission.FORGET_S)


def test_any_number_of_passes_of_one_bearer_costs_the_check_of_one() -> None:
    checked = 0

    def counted(*signed) -> bool:
        nonlocal checked
        checked += 1
        return verify(*signed)

    doors, letter = Admissions(RUN, OWNER.peer, counted), invitation(BEARER, bearer=True)
    genuine = shown(letter)
    for number in range(9):
        # A later version's field that this one does not read: another pass, as genuine.
        payload = genuine.payload + bytes([0xF8, 0x07, number])
        statement = signed_statement(genuine.kind, payload, genuine.key, genuine.not_after)
        another = replace(genuine, payload=payload, signature=BEARER.sign(statement))
        assert another.is_genuine(verify) and another != genuine
        assert doors.show(ME.peer, another, now=NOW) == ""
    assert checked == 2 and doors.admitted(ME.peer, now=NOW)


def test_an_invitation_without_an_end_is_good_for_ever() -> None:
    assert refusal(shown(invitation(end=0)), now=NOW + 10**9) == ""


def test_who_forges_a_pass_takes_up_no_use() -> None:
    doors, letter = admissions(), invitation(BEARER, bearer=True, uses=1)
    doors.show(OTHER.peer, sign(BearerPass(OTHER.peer, letter.invitation), BEARER.peer, OTHER.sign), now=NOW)
    doors.show(ME.peer, shown(letter), now=NOW)
    assert doors.admitted(ME.peer, now=NOW) and not doors.admitted(OTHER.peer, now=NOW)


@given(st.booleans(), st.data())
def test_no_altered_pass_is_admitted(bearer: bool, data: st.DataObject) -> None:
    raw = bytearray(to_bytes(shown(invitation(BEARER if bearer else ME, bearer=bearer))))
    at = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[at // 8] ^= 1 << at % 8
    try:
        mine = from_bytes(bytes(raw), Invitation, BearerPass)
    except BadMessage:
        return
    assert refusal(mine) != ""


@given(st.text(max_size=600))
def test_any_text_is_an_invitation_or_a_value_error(text: str) -> None:
    for candidate in (text, f"peer:{text}", f"invitation:{text}", f"invitation:AAAA:{text}", f"bans:{text}"):
        for read in (Token.parse, lambda words: from_text(words, Bans)):
            with contextlib.suppress(ValueError):
                read(candidate)


@given(st.integers(-200, 200))
def test_the_end_is_that_of_the_guests_clock_within_the_tolerance(late: int) -> None:
    doors = admissions(tolerance_s=60.0)
    doors.show(ME.peer, shown(invitation()), now=NOW)
    assert doors.admitted(ME.peer, "stage", now=END + late) == (late <= 60)


def test_an_open_run_admits_anyone_and_verifies_nothing() -> None:
    def never(peer: PeerId, data: bytes, signature: bytes) -> bool:
        raise AssertionError("verified")

    doors = Admissions(RUN, None, never)
    assert doors.show(ME.peer, shown(invitation()), now=NOW) == "" and doors.admitted(ME.peer, "stage", now=NOW)


# ---------------------------------------------------------------- memory


def counting() -> tuple[Admissions, list[PeerId]]:
    """Admissions, and whose signatures were verified."""
    asked: list[PeerId] = []

    def verifies(peer: PeerId, data: bytes, signature: bytes) -> bool:
        asked.append(peer)
        return verify(peer, data, signature)

    return Admissions(RUN, OWNER.peer, verifies), asked


def test_a_pass_is_verified_once_and_a_forged_one_too() -> None:
    doors, asked = counting()
    good, forged = shown(invitation()), replace(shown(invitation(OTHER, by=OTHER)), key=OWNER.peer)
    for _ in range(3):
        doors.show(ME.peer, good, now=NOW)
        doors.show(OTHER.peer, forged, now=NOW)
    assert len(asked) == 2


def test_what_is_cheap_to_refuse_is_not_verified() -> None:
    doors, asked = counting()
    for bad in (invitation(OTHER), invitation(run=OTHER_RUN), invitation(end=int(NOW) - 1)):
        assert doors.show(ME.peer, shown(bad), now=NOW)
    assert not asked


def test_a_bad_pass_does_not_take_a_good_one_away() -> None:
    doors = admissions()
    doors.show(ME.peer, shown(invitation()), now=NOW)
    assert doors.show(ME.peer, shown(invitation(by=OTHER)), now=NOW)
    assert doors.admitted(ME.peer, "stage", now=NOW)


def test_a_later_invitation_replaces_the_one_before() -> None:
    doors = admissions()
    doors.show(ME.peer, shown(invitation(roles=("trainer",))), now=NOW)
    doors.show(ME.peer, shown(invitation(roles=("stage",), end=END + 9)), now=NOW)
    assert doors.admitted(ME.peer, "stage", now=END + 9) and not doors.admitted(ME.peer, "trainer", now=NOW)


def test_memory_is_bounded_and_keeps_those_who_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bearer's holder mints identities: those seen lately stay, newcomers wait; who has gone makes room."""
    monkeypatch.setattr(admission, "MAX_PEERS", 3)
    doors, crowd = admissions(), [Identity.generate() for _ in range(6)]
    letter = invitation(BEARER, bearer=True, end=END + 10**6)
    for guest in crowd:
        doors.show(guest.peer, shown(letter, guest), now=NOW)
    assert [doors.admitted(guest.peer, now=NOW) for guest in crowd] == [True] * 3 + [False] * 3
    later = NOW + admission.FORGET_S
    doors.show(crowd[0].peer, shown(letter, crowd[0]), now=later)
    doors.show(crowd[5].peer, shown(letter, crowd[5]), now=later)
    assert [doors.admitted(guest.peer, now=later) for guest in crowd] == [True, False, False, False, False, True]
    for guest in crowd:
        doors.show(guest.peer, shown(invitation(OWNER), guest), now=later)
    assert len(doors._refused) <= 3


# ---------------------------------------------------------------- bans


def test_a_ban_of_a_peer_and_of_a_bearers_key() -> None:
    doors = admissions()
    letter = invitation(BEARER, bearer=True)
    doors.show(ME.peer, shown(invitation()), now=NOW)
    doors.show(OTHER.peer, shown(letter, OTHER), now=NOW)
    assert doors.learn(ban(RUN, 1, [ME.peer]))
    assert doors.why_not(ME.peer, now=NOW) == "banned by the run's owner" and doors.admitted(OTHER.peer, now=NOW)
    assert doors.learn(ban(RUN, 2, [BEARER.peer]))
    assert doors.admitted(ME.peer, now=NOW) and not doors.admitted(OTHER.peer, now=NOW)
    newcomer = Identity.generate()
    doors.show(newcomer.peer, shown(letter, newcomer), now=NOW)
    assert not doors.admitted(newcomer.peer, now=NOW)  # whoever that bearer's key lets in from now on, too


@pytest.mark.parametrize(
    "bans",
    [
        replace(ban(RUN, 9, [ME.peer], OTHER), key=OWNER.peer),
        ban(OTHER_RUN, 9, [ME.peer]),
        ban(RUN, 9, [ME.peer], OTHER),
        replace(ban(RUN, 9, [OTHER.peer]), payload=ban(RUN, 9, [ME.peer]).payload),
        replace(ban(RUN, 1, [ME.peer]), not_after=9),
    ],
    ids=["forged", "other run", "other owner", "other peers", "other end"],
)
def test_a_list_that_is_not_the_owners_bans_nobody(bans: SignedMessage[Bans]) -> None:
    doors = admissions()
    doors.show(ME.peer, shown(invitation()), now=NOW)
    assert not doors.learn(bans) and doors.admitted(ME.peer, now=NOW)


@given(st.permutations([ban(RUN, n, [ME.peer] if n % 2 else []) for n in range(1, 5)]))
def test_the_newest_list_counts_in_whatever_order_they_come(lists) -> None:
    doors = admissions()
    for bans in lists:
        number = bans.value.number
        assert doors.learn(bans) == all(number > earlier.value.number for earlier in lists[: lists.index(bans)])
    assert doors.bans.value.number == 4


def test_the_longest_list_fits_and_survives_being_written_and_read() -> None:
    bans = ban(RUN, 10**15, [Identity.generate().peer for _ in range(MAX_BANNED)])
    assert from_text(f"{to_text(bans)}\n", Bans) == bans and len(to_bytes(bans)) < 5000
    assert from_text(to_text(ban(RUN, 1, [])), Bans).value.peers == ()
    with pytest.raises(Wrong, match="peers has 129 entries"):
        ban(RUN, 1, [*bans.value.peers, ME.peer])


def test_a_list_of_an_earlier_version_says_so() -> None:
    with pytest.raises(ValueError, match="signed for an earlier version"):
        from_text(f"bans:{RUN}:{OWNER.peer}:7:{ME.peer}:c2ln", Bans)


# ---------------------------------------------------------------- who may ask what


def test_roles_for_requests() -> None:
    stamp = Stamp(0, 1, Chain("0" * 64))
    assert role_for(Process(0, 0, 0)) is None and role_for(Process(0, 1, 0)) == "stage"
    assert role_for(TrailRequest(stamp)) == "stage" and role_for(Fetch(0, 1, 0, "input", cached=False)) is None
    assert role_for(SnapshotRequest(0, 0)) is None and role_for(ManifestRequest()) is None
    assert role_for(AuditRequest(0, 0, 0, PeerId("mate"))) == "stage"
