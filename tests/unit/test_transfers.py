"""What is signed of payloads: nothing unsigned is taken, and nothing that an honest replica signs convicts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
from audit_stage import Notary, digest_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmnet.audit.case import refusal
from swarmnet.errors import BadMessage, PeerGone, Refused, RejectCode
from swarmnet.ids import Ballot, Chain, PeerId, Restart, RoundId
from swarmnet.messages import (
    AuditData,
    AuditRequest,
    Case,
    Fetch,
    Fetched,
    Gradient,
    Packed,
    Pledge,
    Process,
    Sent,
    Stamp,
    WorkRecord,
)
from swarmnet.pipeline.transfers import NOTHING, Signed, StepTransfers, Transfers
from swarmnet.pipeline.works import WorkBook, digest
from swarmnet.pledge import leaf, path_of, root_of
from swarmnet.statement import statement

pytestmark = pytest.mark.virtual_time

ME, OTHER = PeerId("me"), PeerId("other")
AHEAD, STAGES = 1, 4


def stamp_of(step: int, stage: int = 1) -> Stamp:
    return Stamp(step, stage, Chain("ab" * 32), Restart(2, 0))


def transfers(
    peer: PeerId = ME,
    stage: int = 1,
    allows: Callable[[Stamp], bool] = lambda stamp: True,
    known: Callable[[int, PeerId], bool] = lambda stage, peer: True,
    looked: Callable[[], None] = lambda: None,
) -> Transfers:
    async def look() -> None:
        looked()

    beside = SimpleNamespace(stamp=partial(stamp_of, stage=stage), allows=allows, known=known, looked=look)
    return Transfers(peer, Notary(peer), beside, STAGES)


def signed_by(step: StepTransfers, index: int, kind: str, what: str) -> Sent:
    return step.signed(index, kind, digest_of(what), digest_of("input"), digest_of("gradient"))


def signed_again(sent: Sent) -> Sent:
    return replace(sent, signature=Notary(sent.peer).sign(statement(sent)))


def record(index: int, output: str, answer: str) -> WorkRecord:
    return WorkRecord(index, bytes(32), digest_of(output), bytes(32), digest_of(answer), 0.0, 0)


def proof_of(work: WorkRecord, sent: Sent) -> Case:
    """Who has that work pledged, and has sent that."""
    leaves, id = {work.index: leaf(work)}, RoundId(Ballot(1, ME), 1)
    pledge = Pledge(sent.stamp, id, b"sum", bytes(32), sent.peer, 0, root_of(leaves))
    pledge = replace(pledge, signature=Notary(sent.peer).sign(statement(pledge)))
    return Case(pledge, work, path_of(leaves, work.index), sent)


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
            self.transfers, self.book = transfers(), WorkBook(0)
        self.transfers.replaced()
        self.version, self.open = version, {}
        self._open()

    def _open(self) -> None:
        for step in range(self.version, self.version + AHEAD + 1):
            if step not in self.open:
                self.open[step] = self.transfers.open(step)
                self.book.begin(step)

    def send(self, ahead: int, index: int, kind: str, what: str) -> None:
        step = self.version + ahead
        self.sents.append(signed_by(self.open[step], index, kind, what))

    def count(self, ahead: int, index: int, output: str, answer: str) -> None:
        """It has sent both before, as any replica has that counts; the stage no longer takes anything for old steps."""
        step = self.version + ahead
        if step < self.committed:
            return
        self.send(ahead, index, "output", output)
        self.send(ahead, index, "answer", answer)
        work = self.open[step].counted(record(index, output, answer))
        self.book.add(step, work, ())
        self.works.append((step, work))

    def apply(self, with_me: bool, replaced: bool) -> None:
        """The step is committed, if it was not before, and applied here. replaced: so is the state, at once."""
        pledged = self.book.root(self.version) if with_me else None
        if self.version == self.committed:
            self.committed += 1
        else:
            pledged = None  # others made that sum, or this identity in another life
        self.open.pop(self.version).ended = True
        self.version += 1
        self._open()
        if replaced:
            self.start(self.version, process=False)
        if self.book.contributed(self.version - 1, pledged):
            self.transfers.applied(self.version - 1)


ahead, index, what = st.integers(0, AHEAD), st.just(0), st.sampled_from("xy")
kinds = st.sampled_from(["output", "answer"])
events = st.one_of(
    st.tuples(st.just("send"), ahead, index, kinds, what),
    st.tuples(st.just("count"), ahead, index, what, what),
    st.tuples(st.just("apply"), st.booleans(), st.booleans()),
    st.tuples(st.just("start"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("discard"), ahead),
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
        elif event == "discard":
            life.book.discard(life.version + of[0])
        else:
            getattr(life, event)(*of)
    for (step, work), sent in product(life.works, life.sents):
        if step == sent.stamp.step and work.index == sent.index:
            assert refusal(proof_of(work, sent), frozenset(), Notary.verify)


def settled() -> Transfers:
    """Of a process that nobody was before in any step to come."""
    found = transfers()
    found.applied(0)
    assert found.is_fresh(1) and not found.is_fresh(2)
    return found


def test_a_liar_that_counts_one_thing_and_sends_another_is_shown_to() -> None:
    step = settled().open(2)
    sent, work = signed_by(step, 3, "answer", "other"), record(3, "x", "y")
    assert not sent.again
    assert refusal(proof_of(work, sent), frozenset(), Notary.verify) == ""
    assert refusal(proof_of(step.counted(work), sent), frozenset(), Notary.verify), "it has said so"
    assert refusal(proof_of(record(3, "x", "other"), sent), frozenset(), Notary.verify), "it is no other one"


def test_who_sends_something_else_later_says_so_at_once() -> None:
    step = settled().open(2)
    first = signed_by(step, 3, "output", "x")
    assert not step.counted(record(3, "x", "y")).resent
    assert not first.again and not signed_by(step, 3, "output", "x").again
    assert signed_by(step, 3, "output", "z").again
    step.ended = True
    with pytest.raises(Refused):
        signed_by(step, 3, "output", "x")


def test_another_state_knows_nothing_of_what_was_sent() -> None:
    found = settled()
    found.replaced()
    assert found.is_fresh(1 << 40)
    step = found.open(2)
    assert signed_by(step, 0, "output", "x").again and step.counted(record(0, "x", "y")).resent


# ---------------------------------------------------------------- a receiver

TOKENS, PROOF = Packed("int32", (1, 2), bytes(8)), Packed("uint8", (1, 1, 32), bytes(32))


def hidden(what: str) -> Packed:
    return Packed("fp32", (1, 1, 1), what.encode().ljust(4, b"."))


FED, OUT, BACK, GONE = map(hidden, ("fed", "out", "back", "gone"))


async def made(peers: Sequence[PeerId] = (ME, OTHER, ME, OTHER)) -> tuple[tuple[Sent, ...], ...]:
    """What was signed of stage 1's output, and of stage 1's and 2's answers, of four stages."""
    zero, one, two, three = (transfers(peer, stage).open(4) for stage, peer in enumerate(peers))
    tokens, fed, out = Signed((TOKENS,)), (TOKENS, FED), (TOKENS, OUT)
    first = Signed(fed, await zero.sign(3, "output", fed, tokens))
    output = Signed(out, await one.sign(3, "output", out, first))
    on = (TOKENS, hidden("on"))
    late = Signed(on, await two.sign(3, "output", on, output))
    last = Signed((GONE,), await three.sign(3, "answer", (GONE,), late, Signed(())))
    back = Signed((BACK,), await two.sign(3, "answer", (BACK,), output, last))
    answer = await one.sign(3, "answer", (FED,), first, back)
    return output.sents, answer, back.sents


async def takes(sents: tuple[Sent, ...], kind: str, *, fetched: bool = False, tokens: Packed = TOKENS) -> bool:
    """Does a replica of the neighbour stage?"""
    here, peer = transfers(), sents[0].peer if sents else OTHER
    # It has handed the microbatch on, and so knows its tokens.
    await here.open(4).sign(3, "output", (TOKENS, FED), Signed((tokens,)))
    given = (tokens, OUT, PROOF)
    try:
        if kind == "output" and fetched:
            await here.answered(peer, Fetch(4, 1, 3, "input", cached=False), Fetched(given, sents=sents))
        elif kind == "output":
            await here.fed(peer, Process(4, 2, 3, sents=sents), given)
        elif fetched:
            await here.answered(peer, Fetch(4, 1, 3, "gradient", cached=True), Fetched((FED,), 1.0, 1, sents))
        else:
            await here.answered(peer, Process(4, 1, 3), Gradient(1.0, 1, 0.0, (FED,), sents=sents))
    except BadMessage:
        return False
    return True


WAYS = list(product(["output", "answer"], [False, True]))


@pytest.mark.parametrize(("kind", "fetched"), WAYS)
async def test_what_its_sender_has_not_signed_is_refused(kind: str, fetched: bool) -> None:
    output, answer, back = await made()
    sents = output if kind == "output" else answer
    assert await takes(sents, kind, fetched=fetched)
    assert not await takes((), kind, fetched=fetched)
    assert not await takes(answer if kind == "output" else output, kind, fetched=fetched)
    assert not await takes(back, kind, fetched=fetched), "of another stage"
    others = {
        "stamp": Stamp(5, 1, sents[0].stamp.chain),
        "index": 4,
        "kind": "answer" if kind == "output" else "output",
        "digest": digest_of("other"),
        "input": digest_of("other"),
        "gradient": digest_of("other"),
        "again": not sents[0].again,
        "signature": b"other",
    }
    for name, value in others.items():
        changed = replace(sents[0], **{name: value})
        assert not await takes((changed, *sents[1:]), kind, fetched=fetched), name
        if name not in ("again", "signature"):  # not the word that belongs to this payload, though it is signed
            changed = signed_again(changed)
            assert not await takes((changed, *sents[1:]), kind, fetched=fetched), name


@pytest.mark.parametrize(("kind", "fetched"), WAYS)
async def test_all_that_it_was_made_of_is_signed_and_nothing_else(kind: str, fetched: bool) -> None:
    output, answer, _ = await made()
    sents = output if kind == "output" else answer
    assert len(sents) == (2 if kind == "output" else 6)
    for place in range(1, len(sents)):
        one = sents[place]
        assert not await takes((*sents[:place], *sents[place + 1 :]), kind, fetched=fetched), "it is missing"
        others = {
            "index": 4,
            "stamp": replace(one.stamp, step=5),
            "digest": digest_of("other"),
            "input": digest_of("other"),
            "gradient": digest_of("other"),
            "signature": b"other",
        }
        for name, value in others.items():
            changed = replace(one, **{name: value})
            changed = changed if name == "signature" else signed_again(changed)
            false = (*sents[:place], changed, *sents[place + 1 :])
            assert not await takes(false, kind, fetched=fetched), (place, name)
    more = signed_again(replace(sents[-1], digest=digest_of("more")))
    assert not await takes((*sents, more), kind, fetched=fetched), "it was not made of that"
    assert not await takes(sents, kind, fetched=fetched, tokens=Packed("int32", (1, 2), b"tokens.."))


async def test_a_transfer_that_was_signed_on_another_chain_is_refused() -> None:
    output, *_ = await made()
    for good in (True, False):
        here = transfers(allows=lambda stamp, good=good: good or stamp.stage != 1)
        try:
            await here.fed(output[0].peer, Process(4, 2, 3, sents=output), (TOKENS, OUT, PROOF))
        except BadMessage:
            assert not good
        else:
            assert good


async def test_the_word_of_somebody_unknown_is_not_taken_yet() -> None:
    output, answer, _ = await made((PeerId("stranger"), OTHER, ME, OTHER))
    here = transfers(known=lambda stage, peer: (stage, peer) != (0, "stranger"))
    with pytest.raises(Refused) as refused:
        await here.fed(output[0].peer, Process(4, 2, 3, sents=output), (TOKENS, OUT, PROOF))
    assert refused.value.code is RejectCode.NOT_A_FEEDER, "its caller comes again"
    with pytest.raises(PeerGone):
        await here.answered(answer[0].peer, Process(4, 1, 3), Gradient(1.0, 1, 0.0, (FED,), sents=answer))


async def test_replicas_that_serve_since_a_moment_ago_are_known_after_one_look() -> None:
    output, answer, _ = await made((PeerId("new"), PeerId("newer"), ME, OTHER))
    sought, seen = set[PeerId](), set[PeerId]()

    def known(stage: int, peer: PeerId) -> bool:
        if peer in ("new", "newer") and peer not in seen:
            sought.add(peer)
            return False
        return True

    here = transfers(known=known, looked=lambda: seen.update(sought))
    await here.fed(output[0].peer, Process(4, 2, 3, sents=output), (TOKENS, OUT, PROOF))
    assert seen == {"new", "newer"}
    seen.clear()
    await here.answered(answer[0].peer, Process(4, 1, 3), Gradient(1.0, 1, 0.0, (FED,), sents=answer))


async def test_who_shows_a_work_shows_who_has_signed_what_it_was_made_of() -> None:
    output, answer, back = await made()
    here, tokens = transfers(), (TOKENS,)
    work = WorkRecord(3, output[1].digest, output[0].digest, back[0].digest, answer[0].digest, 0.0, 0)
    request, sents = AuditRequest(4, 1, 3, OTHER), (output[1], *back)
    here.shown(request, AuditData(work, b"", sents=sents), digest(tokens))
    first = WorkRecord(3, digest(tokens), output[1].digest, answer[0].digest, NOTHING, 0.0, 0)
    here.shown(AuditRequest(4, 0, 3, OTHER), AuditData(first, b"", sents=answer), digest(tokens))
    for false in (
        AuditData(work, b""),
        AuditData(work, b"", sents=(output[1],)),
        AuditData(replace(work, input=digest_of("invented")), b"", sents=sents),
        AuditData(replace(work, gradient=digest_of("invented")), b"", sents=sents),
        AuditData(work, b"", sents=tuple(replace(sent, signature=b"x") for sent in sents)),
    ):
        with pytest.raises(BadMessage):
            here.shown(request, false, digest(tokens))
    with pytest.raises(BadMessage):
        here.shown(request, AuditData(work, b"", sents=sents), digest_of("other tokens"))


async def test_evaluations_and_tokens_need_no_signature() -> None:
    here = transfers()
    await here.fed(OTHER, Process(4, 0, 3), (TOKENS, PROOF))
    await here.fed(OTHER, Process(4, 2, 3, "eval"), (TOKENS, OUT, PROOF))
    await here.answered(OTHER, Process(4, 2, 3, "eval"), Gradient(1.0, 1))
    await here.answered(OTHER, Fetch(4, -1, 3, "input", cached=True), Fetched((TOKENS, PROOF)))
