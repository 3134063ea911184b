"""The bytes a manifest is hashed as, and the run id.

RFC 8785 prints one form for one value: `1` and `1.0` in a field of floats are the same number and the same bytes, and
the order of keys, the comments and the layout of the file do not show. Knows no file.
"""

from __future__ import annotations

import hashlib

import rfc8785

from swarmnet.ids import RunId
from swarmnet.manifest.schema import Manifest


def canonical_bytes(manifest: Manifest) -> bytes:
    """Canonical JSON (RFC 8785) of every field of `manifest`, in UTF-8."""
    return rfc8785.dumps(manifest.model_dump(mode="json"))


def run_id(manifest: Manifest) -> RunId:
    """SHA-256 of the canonical bytes, 64 hex digits."""
    return RunId(hashlib.sha256(canonical_bytes(manifest)).hexdigest())
