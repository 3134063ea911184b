"""Byzantine peers that one operator runs are sampled sooner than as many strangers, by production audits."""

from __future__ import annotations

import hashlib
import statistics

from swarmnet.audit.case import suspect_of
from swarmnet.audit.cases import Cases, Check
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.messages import Finished, Pledge, Stamp
from swarmnet.pledge import shares_of

RATE, EACH, STEPS = 0.02, 4, 1000
"""Share that is drawn; microbatches of a member in a step; steps after which a liar counts as never seen."""


class Seal:
    """A signer whose signatures nobody looks at."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    def sign(self, data: bytes) -> bytes:
        return hashlib.sha256(self._name + data).digest()

    @staticmethod
    def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
        return True


class Sampled:
    """A host that keeps what is sampled: nothing else happens here."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def check(self, check: Check) -> None:
        self.checks.append(check)

    def _ignore(self, *about: object) -> None:
        pass

    ask_work = show = tell = ban = vouch = suspend = undecided = _ignore


def until_drawn(members: int, liars: int, number: int, *, together: bool) -> list[int]:
    """Own microbatches of each liar until an honest member has drawn a false one. number: of the run."""
    peers = tuple(PeerId(f"p{place}") for place in range(members))
    false = frozenset(peers[:liars])
    operators = {peer: "theirs" if together and peer in false else peer for peer in peers}
    host = Sampled()
    audits = [
        Cases(peer, 0, Seal(f"{peer}/{number}"), host, microbatches=RATE, contributions=0.0,
              numerics=lambda peer: "same", operator=operators.__getitem__, voters=lambda stage: frozenset(peers))
        for peer in peers if peer not in false
    ]  # fmt: skip
    counted = tuple(
        (peer, Generation(1, 0), frozenset(range(EACH * place, EACH * (place + 1)))) for place, peer in enumerate(peers)
    )
    seen: dict[PeerId, int] = {}
    for step in range(STEPS):
        chain = [Chain(hashlib.sha256(f"{number} {version}".encode()).hexdigest()) for version in (step, step + 1)]
        of = Finished(RoundId(Ballot(1, peers[0]), step), bytes(32), 1, 1.0, 1.0, counted)
        stamp, shares = Stamp(step, 0, chain[0]), shares_of(counted, of.discarded)
        pledges = [Pledge(stamp, of.id, of.digest, shares, peer, 0, bytes(32), b"s") for peer in peers]
        for cases in audits:
            cases.applied(stamp, of, pledges, chain[1], frozenset(peers))
        for check in host.checks:
            peer = suspect_of(check.case)
            if peer in false:
                own = check.case.pledge.stamp.step * EACH + check.index - EACH * peers.index(peer) + 1
                seen[peer] = min(own, seen.get(peer, own))
        host.checks.clear()
        if seen.keys() == false:
            break
    return [seen.get(peer, STEPS * EACH) for peer in sorted(false)]


def test_of_one_operator_they_are_drawn_sooner() -> None:
    means = [
        statistics.mean(own for run in range(60) for own in until_drawn(5, 2, run, together=together))
        for together in (False, True)
    ]
    assert means[1] < 0.9 * means[0]
    # One liar has no friends, so it does not matter who runs it.
    assert until_drawn(4, 1, 3, together=True) == until_drawn(4, 1, 3, together=False)
