from swarmnet.wire.pb import calls_pb2 as _calls_pb2
from swarmnet.wire.pb import control_pb2 as _control_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reserve(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("bytes_per_s", "silence_s")
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SILENCE_S_FIELD_NUMBER: _ClassVar[int]
    bytes_per_s: int
    silence_s: float
    def __init__(self, bytes_per_s: _Optional[int] = ..., silence_s: _Optional[float] = ...) -> None: ...

class Connect(_message.Message):
    __slots__ = ("peer", "id", "reverse")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REVERSE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    id: bytes
    reverse: bool
    def __init__(self, peer: _Optional[str] = ..., id: _Optional[bytes] = ..., reverse: _Optional[bool] = ...) -> None: ...

class Summon(_message.Message):
    __slots__ = ("caller", "id", "reverse")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REVERSE_FIELD_NUMBER: _ClassVar[int]
    caller: str
    id: bytes
    reverse: bool
    def __init__(self, caller: _Optional[str] = ..., id: _Optional[bytes] = ..., reverse: _Optional[bool] = ...) -> None: ...

class Arrive(_message.Message):
    __slots__ = ("id", "full")
    ID_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    full: bool
    def __init__(self, id: _Optional[bytes] = ..., full: _Optional[bool] = ...) -> None: ...

class RelayAsk(_message.Message):
    __slots__ = ("reserve", "connect", "arrive", "ping")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    ARRIVE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    reserve: Reserve
    connect: Connect
    arrive: Arrive
    ping: _control_pb2.Ping
    def __init__(self, reserve: _Optional[_Union[Reserve, _Mapping]] = ..., connect: _Optional[_Union[Connect, _Mapping]] = ..., arrive: _Optional[_Union[Arrive, _Mapping]] = ..., ping: _Optional[_Union[_control_pb2.Ping, _Mapping]] = ...) -> None: ...

class RelayAnswer(_message.Message):
    __slots__ = ("accepted", "reserved", "summon", "pong", "busy", "rejected", "greet_first")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    SUMMON_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    GREET_FIRST_FIELD_NUMBER: _ClassVar[int]
    accepted: _calls_pb2.Accepted
    reserved: Reserved
    summon: Summon
    pong: _calls_pb2.Pong
    busy: _calls_pb2.Busy
    rejected: _calls_pb2.Rejected
    greet_first: _calls_pb2.GreetFirst
    def __init__(self, accepted: _Optional[_Union[_calls_pb2.Accepted, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., summon: _Optional[_Union[Summon, _Mapping]] = ..., pong: _Optional[_Union[_calls_pb2.Pong, _Mapping]] = ..., busy: _Optional[_Union[_calls_pb2.Busy, _Mapping]] = ..., rejected: _Optional[_Union[_calls_pb2.Rejected, _Mapping]] = ..., greet_first: _Optional[_Union[_calls_pb2.GreetFirst, _Mapping]] = ...) -> None: ...
