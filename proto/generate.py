"""Write `swarmnet/v1/messages.proto`, what peers say to each other, for readers and other languages.

`python proto/generate.py [FILE]`. The dataclasses declare the messages (`swarmnet.wire.fields`); this prints them.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from swarmnet.audit.evidence import Evidence
from swarmnet.audit.receipts import Receipt
from swarmnet.bounds import ANY_RUN
from swarmnet.directory import BearerPass, Invitation
from swarmnet.manifest.extension import Extension
from swarmnet.net.admission import Bans
from swarmnet.net.records import Announcement
from swarmnet.wire import convert, punch, relay
from swarmnet.wire.fields import PACKAGE, struct_of

TEXT = Path(__file__).resolve().parent / "swarmnet" / "v1" / "messages.proto"
HEAD = f"""\
// What peers say to each other. `python proto/generate.py` writes this file from the dataclasses of these names, which
// have the bounds of all fields, too.
//
// A set of indexes in a field of bytes is empty, or a byte 0 and a bitmap (bit i of byte i / 8, least significant
// first), or a byte 1 and runs: how many are left out, how many are in it but one, and so on, as varints. Several peers
// in a field of bytes are their Ed25519 keys, 32 bytes each. Of Contributions, `owners` has for each index the place of
// its contributor in `peers`, from 1 on, or 0: as one bitmap over the indexes for each bit that the number of peers
// has, the lowest first, all of one length.
syntax = "proto3";

package {PACKAGE};
"""
ENVELOPES = (convert.CONTROL, convert.REQUESTS, convert.ANSWERS, convert.GREETINGS, relay.ASKS, relay.REPLIES)
SIGNED = (Announcement, Bans, Extension, Invitation, BearerPass, Receipt, Evidence)
"""What a SignedMessage holds."""

ROOTS = (
    *ENVELOPES,
    punch.ASKS,
    punch.REPLIES,
    *(struct_of(make, ANY_RUN) for make in (convert.BulkAsk, convert.BulkOffer, *SIGNED)),
)
WIDTH = 120


def text() -> str:
    """The whole file; a message stands after those in it."""
    messages: dict[str, str] = {}
    for root in ROOTS:
        _add(root.message.DESCRIPTOR, messages)
    return "\n".join((HEAD, *messages.values()))


def _add(message: Descriptor, messages: dict[str, str]) -> None:
    for field in message.fields:
        if field.message_type is not None and field.message_type.name not in messages:
            _add(field.message_type, messages)
    known = {
        name: found
        for module in list(sys.modules.values())
        if module.__name__.startswith("swarmnet.")
        for name, found in vars(module).items()
        if is_dataclass(found)
    }
    make = known.get(message.name)
    docs = _docs(make) if make else {}
    choice, others = [], []
    for field in message.fields:
        in_choice = field.containing_oneof is not None and field.containing_oneof.name == "kind"
        indent = "    " if in_choice else "  "
        lines = [*_comment(docs.get(field.name, ""), indent), f"{indent}{_declaration(field, bare=in_choice)}"]
        (choice if in_choice else others).extend(lines)
    body = [*(["  oneof kind {", *choice, "  }"] if choice else []), *others]
    head = [*_comment(inspect.getdoc(make) or "" if make else ""), f"message {message.name} {{"]
    messages[message.name] = "\n".join([*head, *body, "}"]) + "\n" if body else "\n".join(head) + "}\n"


def _declaration(field: FieldDescriptor, *, bare: bool) -> str:
    types = {getattr(FieldDescriptor, name): name[5:].lower() for name in dir(FieldDescriptor) if name[:5] == "TYPE_"}
    kind = field.message_type.name if field.message_type is not None else types[field.type]
    optional = field.containing_oneof is not None and not bare
    label = "repeated " if field.is_repeated else "optional " if optional else ""
    return f"{label}{kind} {field.name} = {field.number};"


def _docs(make: type) -> dict[str, str]:
    """What stands under each field of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(make))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(said.value.value)
        for field, said in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant)
    }


def _comment(words: str, indent: str = "") -> Iterator[str]:
    for paragraph in words.split("\n\n"):
        yield from textwrap.wrap(paragraph, WIDTH, initial_indent=f"{indent}// ", subsequent_indent=f"{indent}// ")


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else TEXT).write_text(text(), encoding="utf-8")
