"""Does it matter who runs a liar's friends? Production audits of one stage, without a swarm around them.

    python benchmarks/operators.py [--members N] [--liars K] [--runs R]

Of N members K lie in every microbatch, and look away from each other. Counted are a liar's own microbatches until an
honest member draws a false one: in runs where each liar has an operator of its own, and in the same runs, with the same
secrets and chains, where all liars have one. The ratio of the means should be that of docs/trust.md's formula, since
members of other operators draw q among them. Seconds.
"""

from __future__ import annotations

import argparse
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
        stamp, shares = Stamp(step, 0, chain[0]), shares_of(counted, of.voided)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=5, help="of the stage (%(default)s)")
    parser.add_argument("--liars", type=int, default=2, help="of them (%(default)s)")
    parser.add_argument("--runs", type=int, default=100, help="(%(default)s)")
    options = parser.parse_args()
    n, k = options.members, options.liars
    if not 0 < k < n:
        parser.error("some members must be honest, and some liars")
    apart, together = (
        [own for run in range(options.runs) for own in until_drawn(n, k, run, together=one)] for one in (False, True)
    )
    one, other = statistics.mean(together), statistics.mean(apart)
    spread = statistics.pstdev([mine - one / other * its for mine, its in zip(together, apart, strict=True)])
    print(
        f"{k} liars of {n}, q = {RATE:.0%}: drawn after {other:.1f} of its own microbatches where they are strangers, "
        f"{one:.1f} where one runs them: ratio {one / other:.3f} +- {spread / other / len(apart) ** 0.5:.3f} "
        f"(formula {(n - k) / (n - 1):.3f})"
    )


if __name__ == "__main__":
    main()
