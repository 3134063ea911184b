"""Get a run's manifest from those who take part in it, believing nobody: its hash is the run id.

Peers are asked one after the other until one gives the genuine text; who gives another one is named. Knows no
directory: whom to ask is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarmnet.errors import BadMessage, Refused, RejectCode, SwarmError, UsageError
from swarmnet.ids import PeerId, RunId
from swarmnet.manifest.file import load, run_id
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import ManifestData, ManifestRequest, Rejected
from swarmnet.transport import Transport, ask

PATIENCE_S = 5.0
"""A peer that says nothing for so long is passed over."""

OnFailure = Callable[[PeerId, SwarmError], None]


async def fetch_manifest(
    transport: Transport, run: RunId, peers: Sequence[PeerId], *, on_failure: OnFailure
) -> Manifest | None:
    """Ask `peers` in order for the manifest of `run`; None if none of them had it.

    on_failure(peer, error) is told why each in vain: PeerGone, PeerTimeout, Refused, or BadMessage (it lied, or has
    another version of swarmnet).
    """
    for peer in peers:
        try:
            return await _ask_one(transport, run, peer)
        except SwarmError as error:
            on_failure(peer, error)
    return None


async def _ask_one(transport: Transport, run: RunId, peer: PeerId) -> Manifest:
    match answer := await ask(transport, peer, ManifestRequest(), patience=lambda: PATIENCE_S):
        case Rejected():
            raise Refused(answer.code, answer.reason, peer=peer)
        case ManifestData(text):
            return genuine(text, run, peer=peer)
        case _:
            raise BadMessage(RejectCode.MALFORMED, "not an answer to ManifestRequest", peer=peer)


def genuine(text: str, run: RunId, *, peer: PeerId) -> Manifest:
    """`text` as a manifest, if it is the one of `run`. Raises BadMessage."""
    try:
        manifest = load(f"{text}\n", where="what it sent")  # with a line break it is never taken for a path
    except UsageError as error:
        raise BadMessage(RejectCode.MALFORMED, f"not a manifest of this version: {error}", peer=peer) from error
    if (found := run_id(manifest)) != run:
        raise BadMessage(RejectCode.WRONG_RUN, f"the manifest of another run, {found[:12]}", peer=peer)
    return manifest
