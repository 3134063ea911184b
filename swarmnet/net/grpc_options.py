"""How gRPC is set up: options of channels and of the listening port, the allocator, and the transport's own limits.

Measured on loopback and emulated links; docs/data-plane.md has the figures.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from typing import Any

from swarmnet.manifest.schema import Limits
from swarmnet.net.tls import TLS_NAME
from swarmnet.wire.convert import MAX_MESSAGE_BYTES
from swarmnet.wire.framing import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """What one peer grants the others, and how long it waits.

    max_payload_bytes: of one call or answer. stall_s: a peer that moves nothing for so long has timed out.
    max_clock_offset_s: peers whose clocks differ more refuse each other. bulk_channels: connections per peer beside the
    control channel (one TCP connection fills a long fat link only partly). outbox: one-way messages kept per peer.
    forget_s: a peer without an address for so long, and without a connection in use, is forgotten.
    """

    max_payload_bytes: int = 1 << 30
    stall_s: float = 10.0
    max_clock_offset_s: float = 60.0
    bulk_channels: int = 2
    outbox: int = 1024
    forget_s: float = 60.0

    def __post_init__(self) -> None:
        assert 1 <= self.bulk_channels <= 4, "one to four bulk channels per peer"

    @classmethod
    def of(cls, limits: Limits) -> GrpcConfig:
        """What the run has agreed on; the rest as above."""
        return cls(max_payload_bytes=limits.max_payload_mib << 20, max_clock_offset_s=limits.max_clock_offset_s)


_BOTH_ENDS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + CHUNK_BYTES + (64 << 10)),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.bdp_probe", 1),                             # without it: 8-30 Mb/s at 50-200 ms
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),                  # its default of 60 s is what really times a ping
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH_ENDS,
    ("grpc.ssl_target_name_override", TLS_NAME),
    ("grpc.use_local_subchannel_pool", 1),                   # else all channels to a peer share one connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),                              # retry belongs to the call
]

LISTENER_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH_ENDS,
    ("grpc.so_reuseport", 0),                                # a taken port is an error, not a shared port
    ("grpc.http2.max_ping_strikes", 0),                      # else keepalive gets callers disconnected
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.max_concurrent_streams", 256),
]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@functools.cache
def tune_allocator() -> bool:
    """Keep megabyte buffers on glibc's heap, once per process: worth 3x, since mapped ones fault in every page anew.

    Returns whether it applied; other C libraries are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_M_TRIM_THRESHOLD, 1 << 30))
