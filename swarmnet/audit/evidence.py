"""A decided case in a file: JSON that `swarmnet audit verify` checks years later, without the run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from swarmnet.audit.case import Verify, at_fault, contributors_in, count_of, refusal
from swarmnet.audit.pledge import is_run_id
from swarmnet.bounds import ANY_RUN
from swarmnet.errors import BadMessage
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.messages import Case
from swarmnet.wire.convert import Reader, write_control
from swarmnet.wire.pb import control_pb2

FORMAT = "swarmnet evidence 5"

_READER = Reader(ANY_RUN)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a file holds. run: as its writer says; what is signed is the pledge's chain."""

    run: str
    case: Case

    @property
    def run_proven(self) -> bool:
        """Does the pledge's chain stand for `run`? Only the first chain tells its run by itself."""
        stamp = self.case.pledge.stamp
        return stamp.chain == first_chain(RunId(self.run), stamp.stage)

    def refusal(self, verify: Verify) -> str:
        """Why it proves nothing, in words; "" if it does."""
        if self.case.pledge.stamp.step == 0 and not self.run_proven:
            return "its pledge was signed in another run than the one that the file names"
        return refusal(self.case, contributors_in(self.case), verify)

    @property
    def at_fault(self) -> frozenset[PeerId]:
        """The peers whose fault it proves, if `refusal` has nothing against it."""
        return at_fault(self.case, contributors_in(self.case))

    @property
    def count(self) -> tuple[int, int]:
        """How many verifiers agree, and how many there are."""
        return count_of(self.case, contributors_in(self.case))

    def to_json(self) -> str:
        """The content of a file."""
        envelope = control_pb2.Envelope.FromString(write_control(self.case))
        shown: dict[str, Any] = MessageToDict(envelope, preserving_proto_field_name=True)
        return json.dumps({"format": FORMAT, "run": self.run} | shown, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Evidence:
        """Read a file. No signature is looked at. Raises ValueError, in words."""
        try:
            table = json.loads(text)
            json.dumps(table, ensure_ascii=False).encode()  # protobuf fails on half a character with any error
        except (ValueError, RecursionError) as error:
            raise ValueError("it is not JSON, or has text or numbers that JSON may not have") from error
        if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        run = table.pop("run", None)
        if not is_run_id(run):
            raise ValueError("its run is not 64 hex digits")
        if len(table) != 1:
            raise ValueError("it has not one case, or fields that evidence does not have")
        try:
            message = _READER.control(ParseDict(table, control_pb2.Envelope()).SerializeToString())
        # protobuf fails on what is odd enough with any of these.
        except (BadMessage, ParseError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError("its case has fields that are damaged") from error
        if not isinstance(message, Case):
            raise ValueError("it has no case")
        return cls(run, message)
