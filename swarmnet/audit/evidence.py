"""A proof in a file: JSON that `swarmnet verify` and anybody else can check years later.

The sum's contributors are in it, too. The accused has signed them (`Pledge.shares`), and they make the jury.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from swarmnet.audit.pledge import is_run_id, jury_of, settled, shares_of
from swarmnet.audit.proof import Proof, Verify, accused_of, odd, pledge_of, refusal, says_of
from swarmnet.bounds import ANY_RUN, MAX_INDEXES, MAX_MEMBERS
from swarmnet.errors import BadMessage
from swarmnet.ids import Generation, PeerId, RunId, first_chain
from swarmnet.messages import Contributions, Indexes, Missent, Pair, Pledge, Verdict
from swarmnet.wire.convert import Reader, write_control
from swarmnet.wire.fields import bitmap_problem, from_bitmap, to_bitmap
from swarmnet.wire.pb import control_pb2
from swarmnet.wire.peer_ids import is_peer_id

FORMAT = "swarmnet evidence 4"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a file holds. run: as its writer says; what is signed is the pledge's chain.

    contributions, voided: of the sum that was pledged; a verdict needs them.
    """

    run: str
    contributions: Contributions
    voided: Indexes
    proof: Proof

    @property
    def pledge(self) -> Pledge:
        """The one that the proof is about."""
        return pledge_of(self.proof)

    @property
    def run_proven(self) -> bool:
        """Does the pledge's chain stand for `run`? Only the first chain tells its run by itself."""
        stamp = self.pledge.stamp
        return stamp.chain == first_chain(RunId(self.run), stamp.stage)

    def refusal(self, verify: Verify) -> str:
        """Why it proves nothing, in words; "" if it does."""
        # The jury is the one that the accused has named itself; other proofs need none.
        if isinstance(self.proof, Verdict) and shares_of(self.contributions, self.voided) != self.pledge.shares:
            return (
                "its list of who contributed is not the one that the pledge was signed for, so nobody knows who judges"
            )
        return refusal(self.proof, self._contributors, verify)

    @property
    def odd(self) -> frozenset[PeerId]:
        """Who has done wrong, if `refusal` has nothing against it."""
        return odd(self.proof, self._contributors)

    @property
    def count(self) -> tuple[frozenset[PeerId], int, int]:
        """Of a verdict that is not refused: who is odd, how many of the jury agree, how many it has."""
        assert isinstance(self.proof, Verdict)
        jury, says = jury_of(self._contributors, accused_of(self.proof)), says_of(self.proof)
        truth = settled(says, jury)
        return self.odd, sum(says.get(peer) == truth for peer in jury), len(jury)

    @property
    def _contributors(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, _, indexes in self.contributions if indexes)

    def to_json(self) -> str:
        """The content of a file."""
        envelope = control_pb2.Envelope.FromString(write_control(self.proof))
        shown: dict[str, Any] = MessageToDict(envelope, preserving_proto_field_name=True)
        shares = {peer: to_bitmap(indexes).hex() for peer, _, indexes in self.contributions if indexes}
        about = {"format": FORMAT, "run": self.run, "contributions": shares, "voided": to_bitmap(self.voided).hex()}
        return json.dumps(about | shown, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Evidence:
        """Read a file. No signature is looked at. Raises ValueError, in words."""
        try:
            table = json.loads(text)
            # Half a character, which JSON may have, is text to nobody: protobuf fails on it with any error.
            json.dumps(table, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON (line {error.lineno})") from error
        except UnicodeError as error:
            raise ValueError("it has text that is no Unicode") from error
        except (ValueError, RecursionError) as error:
            raise ValueError("it has a number that is too long, or is nested too deeply") from error
        if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        run, shares, voided = (table.pop(name, None) for name in ("run", "contributions", "voided"))
        if not is_run_id(run):
            raise ValueError("its run is not 64 hex digits")
        if not isinstance(shares, dict):
            raise ValueError("its contributions are not a table of peers")
        if not all(map(is_peer_id, shares)):
            raise ValueError("somebody contributed who has no peer id")
        contributions = tuple((PeerId(peer), _NO_GENERATION, _indexes(bits)) for peer, bits in shares.items())
        # A peer tells on what it finds: only what can be told.
        named = [index for _, _, indexes in contributions for index in indexes]
        if len(named) > len(set(named)) or len(contributions) > MAX_MEMBERS:
            raise ValueError("an index is in two shares, or too many contributed")
        found = cls(run, contributions, _indexes(voided), _proof(table))
        if found.pledge.stamp.step == 0 and not found.run_proven:
            raise ValueError("its pledge was signed in another run than the one that the file names")
        return found


_NO_GENERATION = Generation(0, 0)
_READER = Reader(ANY_RUN)


def _proof(table: dict[str, Any]) -> Proof:
    if len(table) != 1:
        raise ValueError("it has not one proof, or fields that evidence does not have")
    try:
        message = _READER.control(ParseDict(table, control_pb2.Envelope()).SerializeToString())
    except BadMessage as error:
        raise ValueError(f"its proof is malformed ({str(error).splitlines()[0]})") from error
    # protobuf fails on what is odd enough with any of these.
    except (ParseError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError("its proof has fields that are damaged") from error
    if isinstance(message, Verdict | Pair | Missent):
        return message
    raise ValueError("it has no proof")


def _indexes(bits: object) -> Indexes:
    try:
        data = bytes.fromhex(bits)  # type: ignore[arg-type]  # a file has anything
    except (ValueError, TypeError) as error:
        raise ValueError("its contributions, or what is voided, are not hex digits") from error
    if problem := bitmap_problem(data, MAX_INDEXES):
        raise ValueError(problem)
    return from_bitmap(data)
