"""How gRPC is set up: options of channels and of the listening port, the allocator, and the transport's own limits.

Measured on loopback and emulated links (`benchmarks/transport.py`, `benchmarks/links.py`).
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from typing import Any

from swarmnet.bounds import Bounds
from swarmnet.data.windows import HASH_BYTES
from swarmnet.manifest.terms import RunTerms
from swarmnet.messages import AuditRequest, Fetch, Heartbeat, MemberState, Process, StagePlan
from swarmnet.net.descriptors import raise_limit
from swarmnet.net.limits import MESSAGE_BYTES, MESSAGES
from swarmnet.net.tls import TLS_NAME
from swarmnet.pacing import Rate
from swarmnet.wire.codecs import encoded_bytes
from swarmnet.wire.convert import IN_ANY_RUN, Reader
from swarmnet.wire.fields import MAX_MESSAGE_BYTES
from swarmnet.wire.framing import CHUNK_BYTES

_LARGE_STAGE = 128
"""Members. Messages of more are read as well; some of their repetitions wait."""


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """What one peer grants the others, and how long it waits."""

    max_payload_bytes: int = 1 << 30
    """Of one call or answer."""
    max_microbatch_bytes: int = 1 << 30
    """Of one call or answer that carries a microbatch."""
    stall_s: float = 10.0
    """A peer that moves nothing for so long has timed out."""
    handshake_s: float = 10.0
    """A connection that has not proven an identity after so long is closed."""
    max_clock_offset_s: float = 60.0
    """Two peers refuse each other if their clocks differ by more."""
    call_channels: int = 2
    """Connections per peer in addition to the control channel: one TCP connection fills a long fat link only partly."""
    outbox: int = 1024
    """One-way messages kept per peer."""
    reader: Reader = IN_ANY_RUN
    """Reads messages, within the bounds of the run."""
    messages: Rate = MESSAGES
    message_bytes: Rate = MESSAGE_BYTES
    """One-way messages that a caller may send, and their bytes."""
    links: int = 4
    """Open links of one caller: it has one, and those of broken connections for a while."""
    connections: int = 4096
    """That others have opened, those of strangers who have proven nothing yet included; never more than half of this
    process's descriptors."""
    calls: int = 512
    """Open calls of one caller: those in flight and as many that wait, of two open steps, and shards and pieces of
    state."""
    forget_s: float = 60.0
    """A peer without an address for so long, and without a connection in use, is forgotten."""

    def __post_init__(self) -> None:
        assert 1 <= self.call_channels <= 4, "one to four channels for calls per peer"

    @classmethod
    def of(cls, terms: RunTerms) -> GrpcConfig:
        """What the run has agreed on; the rest as above."""
        messages, message_bytes = _messages(terms)
        return cls(
            max_payload_bytes=terms.max_payload_bytes,
            max_microbatch_bytes=_microbatch_bytes(terms),
            max_clock_offset_s=terms.max_clock_offset_s,
            reader=Reader(Bounds(terms.num_stages, terms.microbatches)),
            messages=messages,
            message_bytes=message_bytes,
        )

    def max_bytes(self, request: type) -> int:
        """The largest payload of a call of this type, either way."""
        # Who is audited shows what went in and the gradient that came back.
        microbatches = {Process: 1, Fetch: 1, AuditRequest: 2}.get(request)
        if microbatches is None:
            return self.max_payload_bytes
        return min(microbatches * self.max_microbatch_bytes, self.max_payload_bytes)


def _messages(terms: RunTerms) -> tuple[Rate, Rate]:
    """Several times what the busiest replica sends: one of a large stage repeats its longest messages at every
    heartbeat, and a claim or an answer to one comes with every microbatch."""
    messages_per_s = MESSAGES.per_s + terms.microbatches / 4
    reader = Reader(Bounds(terms.num_stages, terms.microbatches, members=_LARGE_STAGE))
    periodic = reader.most_bytes(Heartbeat, StagePlan, MemberState)
    bytes_per_s = 256 * messages_per_s + periodic / terms.beat_s
    return Rate(messages_per_s, MESSAGES.burst_s), Rate(bytes_per_s, MESSAGE_BYTES.burst_s)


def _microbatch_bytes(terms: RunTerms) -> int:
    """The most that a stage takes or hands out of one microbatch: its tokens with their proof, and what crosses a
    boundary."""
    batch, length, _ = terms.boundary
    depth = terms.num_windows.bit_length()  # at least that of the tree over the windows
    tokens = encoded_bytes("int32", (batch, length + 1)) + encoded_bytes("uint8", (batch, depth, HASH_BYTES))
    return tokens + max(encoded_bytes(codec, terms.boundary) for codec in terms.boundary_codecs)


_BOTH_ENDS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + CHUNK_BYTES + (64 << 10)),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.bdp_probe", 1),  # without it: 8-30 Mb/s at 50-200 ms
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # its default of 60 s is what really times a ping
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH_ENDS,
    ("grpc.ssl_target_name_override", TLS_NAME),
    ("grpc.use_local_subchannel_pool", 1),  # else all channels to a peer share one connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # retry belongs to the call
]


def listener_options(config: GrpcConfig) -> list[tuple[str, Any]]:
    """Of the listening port."""
    return [
        *_LISTENER_OPTIONS,
        ("grpc.server_handshake_timeout_ms", round(1000 * config.handshake_s)),
        ("grpc.max_allowed_incoming_connections", min(config.connections, raise_limit() // 2)),
    ]


_LISTENER_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH_ENDS,
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a shared port
    # gRPC counts a ping less than a second after another, with no data sent in between, and disconnects the sender of
    # too many. Keepalive never causes one, probing for bandwidth a few. An endless stream of pings is disconnected.
    ("grpc.http2.max_ping_strikes", 1_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.max_concurrent_streams", 256),
]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@functools.cache
def tune_allocator() -> bool:
    """Keep megabyte buffers on glibc's heap, once per process: worth 3x, since mapped ones fault in every page again.

    Returns whether it applied; other C libraries are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_M_TRIM_THRESHOLD, 1 << 30))
