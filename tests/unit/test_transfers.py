"""What is signed of payloads: nothing unsigned is taken, and nothing that an honest replica signs convicts it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from court_room import Notary, digest_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted import on_virtual_time

from swarmnet.audit.pledge import leaf, path_of, root_of, sent_statement, statement
from swarmnet.audit.proof import refusal
from swarmnet.errors import BadMessage, Refused
from swarmnet.ids import Ballot, Chain, PeerId, Restart, RoundId
from swarmnet.messages import Fetch, Fetched, Gradient, Missent, Packed, Pledge, Process, Sent, Stamp, WorkRecord
from swarmnet.pipeline.transfers import Transfers
from swarmnet.pipeline.works import WorkBook

ME, OTHER = PeerId("me"), PeerId("other")
AHEAD = 1


def stamp_of(step: int) -> Stamp:
    return Stamp(step, 1, Chain("ab" * 32), Restart(2, 0))


def transfers(peer: PeerId = ME) -> Transfers:
    return Transfers(peer, Notary(peer), stamp_of, WorkBook(0))


def record(index: int, output: str, answer: str) -> WorkRecord:
    return WorkRecord(index, bytes(32), digest_of(output), bytes(32), digest_of(answer), 0.0, 0)


def proof_of(work: WorkRecord, sent: Sent) -> Missent:
    """Who has that work pledged, and has sent that."""
    leaves, id = {work.index: leaf(work)}, RoundId(Ballot(1, ME), 1)
    pledge = Pledge(sent.stamp, id, b"sum", bytes(32), sent.peer, 0, bytes(32), root_of(leaves))
    pledge = replace(pledge, signature=Notary(sent.peer).sign(statement(pledge)))
    return Missent(pledge, work, path_of(leaves, work.index), sent)


# ---------------------------------------------------------------- an honest replica


class Life:
    """One identity through any steps, restarts and repairs, in a stage that goes on. Whatever it computes may differ
    from what it computed before."""

    def __init__(self) -> None:
        self.committed = self.version = 0  # of the stage; of its own
        self.sents: list[Sent] = []
        self.works: list[tuple[int, WorkRecord]] = []
        self.start(0)
        self.count(0, 0, "x", "x")
        self.apply(True, False)
        self.apply(False, False)

    def start(self, version: int, *, process: bool = True) -> None:
        if process:
            self.transfers = transfers()
        self.transfers.replaced()
        self.version, self.open = version, {}
        self._open()

    def _open(self) -> None:
        for step in range(self.version, self.version + AHEAD + 1):
            if step not in self.open:
                self.open[step] = self.transfers.open(step)
                self.transfers.works.begin(step)

    def send(self, ahead: int, index: int, kind: str, what: str) -> None:
        step = self.version + ahead
        self.sents.append(self.open[step].signed(index, kind, digest_of(what)))

    def count(self, ahead: int, index: int, output: str, answer: str) -> None:
        """It has sent both before, as any replica has that counts; the stage no longer takes anything for old steps."""
        step = self.version + ahead
        if step < self.committed:
            return
        self.send(ahead, index, "output", output)
        self.send(ahead, index, "answer", answer)
        work = self.open[step].counted(record(index, output, answer))
        self.transfers.works.add(step, work, ())
        self.works.append((step, work))

    def apply(self, with_me: bool, replaced: bool) -> None:
        """The step is committed, if it was not before, and applied here. replaced: so is the state, at once."""
        mine = frozenset(self.transfers.works.records(self.version)) if with_me else frozenset()
        if self.version == self.committed:
            self.committed += 1
        else:
            mine = frozenset()  # others made that sum, or this identity in another life
        self.open.pop(self.version).ended = True
        self.version += 1
        self._open()
        if replaced:
            self.start(self.version, process=False)
        self.transfers.applied(self.version - 1, mine)


ahead, index, what = st.integers(0, AHEAD), st.just(0), st.sampled_from("xy")
kinds = st.sampled_from(["output", "answer"])
events = st.one_of(
    st.tuples(st.just("send"), ahead, index, kinds, what),
    st.tuples(st.just("count"), ahead, index, what, what),
    st.tuples(st.just("apply"), st.booleans(), st.booleans()),
    st.tuples(st.just("start"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("void"), ahead),
)


# It has sent something of the next step, and what it was then is gone.
@example([("send", 1, 0, "output", "x"), ("start", 0, True), ("count", 0, 0, "x", "x"), ("apply", True, False),
          ("count", 0, 0, "y", "x")])  # fmt: skip
@settings(max_examples=600, deadline=None)
@given(st.lists(events, max_size=12))
def test_nothing_that_an_honest_replica_has_sent_contradicts_what_it_has_counted(lived: list[tuple]) -> None:
    life = Life()
    for event, *of in lived:
        if event == "start":
            life.start(max(life.committed - of[0], 0), process=of[1])
        elif event == "void":
            life.transfers.works.void(life.version + of[0])
        else:
            getattr(life, event)(*of)
    for (step, work), sent in product(life.works, life.sents):
        if step == sent.stamp.step and work.index == sent.index:
            assert refusal(proof_of(work, sent), frozenset(), Notary.verify)


def settled() -> Transfers:
    """Of a process that nobody was before in any step to come."""
    found = transfers()
    found.works.begin(0)
    found.works.add(0, found.open(0).counted(record(0, "x", "y")), ())
    found.applied(0, frozenset({0}))
    assert found.is_fresh(1) and not found.is_fresh(2)
    return found


def test_a_liar_that_counts_one_thing_and_sends_another_is_shown_to() -> None:
    step = settled().open(2)
    sent, work = step.signed(3, "answer", digest_of("other")), record(3, "x", "y")
    assert not sent.again
    assert refusal(proof_of(work, sent), frozenset(), Notary.verify) == ""
    assert refusal(proof_of(step.counted(work), sent), frozenset(), Notary.verify), "it has said so"
    assert refusal(proof_of(record(3, "x", "other"), sent), frozenset(), Notary.verify), "it is no other one"


def test_who_sends_something_else_later_says_so_at_once() -> None:
    step = settled().open(2)
    first = step.signed(3, "output", digest_of("x"))
    assert not step.counted(record(3, "x", "y")).resent
    assert not first.again and not step.signed(3, "output", digest_of("x")).again
    assert step.signed(3, "output", digest_of("z")).again
    step.ended = True
    with pytest.raises(Refused):
        step.signed(3, "output", digest_of("x"))


def test_another_state_knows_nothing_of_what_was_sent() -> None:
    found = settled()
    found.replaced()
    assert found.is_fresh(1 << 40)
    step = found.open(2)
    assert step.signed(0, "output", digest_of("x")).again and step.counted(record(0, "x", "y")).resent
    found.works.begin(2)
    found.applied(2, frozenset({0}))
    assert found.is_fresh(9), "that sum has work of its own that it does not know of"


# ---------------------------------------------------------------- a receiver

HIDDEN = Packed("fp32", (1, 1, 1), b"abcd")
INPUT = (Packed("int32", (1, 2), bytes(8)), HIDDEN, Packed("uint8", (1, 1, 32), bytes(32)))
ANSWER = (HIDDEN,)


async def signed(kind: str, peer: PeerId = OTHER) -> Sent:
    return await transfers(peer).open(4).sign(3, kind, INPUT[:-1] if kind == "output" else ANSWER)


async def takes(sent: Sent | None, kind: str, *, fetched: bool = False) -> bool:
    """Does a replica of the neighbour stage?"""
    here = transfers()
    try:
        if kind == "output" and fetched:
            await here.fetched(OTHER, Fetch(4, 1, 3, "input", cached=False), Fetched(INPUT, sent=sent))
        elif kind == "output":
            await here.fed(OTHER, Process(4, 2, 3, sent=sent), INPUT)
        elif fetched:
            await here.fetched(OTHER, Fetch(4, 1, 3, "gradient", cached=True), Fetched(ANSWER, 1.0, 1, sent))
        else:
            await here.answered(OTHER, Process(4, 1, 3), Gradient(1.0, 1, 0.0, ANSWER, sent=sent))
    except BadMessage:
        return False
    return True


@pytest.mark.parametrize(("kind", "fetched"), list(product(["output", "answer"], [False, True])))
def test_what_its_sender_has_not_signed_is_refused(kind: str, fetched: bool) -> None:
    async def main() -> None:
        sent = await signed(kind)
        assert await takes(sent, kind, fetched=fetched)
        assert not await takes(None, kind, fetched=fetched)
        assert not await takes(await signed(kind, ME), kind, fetched=fetched), "somebody else has"
        others = {
            "stamp": Stamp(5, 1, sent.stamp.chain),
            "index": 4,
            "kind": "answer" if kind == "output" else "output",
            "digest": digest_of("other"),
            "again": not sent.again,
            "signature": b"other",
        }
        for name, value in others.items():
            changed = replace(sent, **{name: value})
            assert not await takes(changed, kind, fetched=fetched), name
            if name not in ("again", "signature"):  # not the word that belongs to this payload, though it is signed
                changed = replace(changed, signature=Notary(OTHER).sign(sent_statement(changed)))
                assert not await takes(changed, kind, fetched=fetched), name

    on_virtual_time(main())


def test_evaluations_and_tokens_need_no_signature() -> None:
    async def main() -> None:
        here = transfers()
        await here.fed(OTHER, Process(4, 0, 3), INPUT[::2])
        await here.fed(OTHER, Process(4, 2, 3, "eval"), INPUT)
        await here.answered(OTHER, Process(4, 2, 3, "eval"), Gradient(1.0, 1))
        await here.fetched(OTHER, Fetch(4, -1, 3, "input", cached=True), Fetched(INPUT[::2]))

    on_virtual_time(main())
