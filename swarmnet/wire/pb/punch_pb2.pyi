from swarmnet.wire.pb import calls_pb2 as _calls_pb2
from swarmnet.wire.pb import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SeenPort(_message.Message):
    __slots__ = ("host", "port")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("inside", "outside", "token")
    INSIDE_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    inside: SeenPort
    outside: _containers.RepeatedCompositeFieldContainer[SeenPort]
    token: bytes
    def __init__(self, inside: _Optional[_Union[SeenPort, _Mapping]] = ..., outside: _Optional[_Iterable[_Union[SeenPort, _Mapping]]] = ..., token: _Optional[bytes] = ...) -> None: ...

class Observe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Now(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PunchAsk(_message.Message):
    __slots__ = ("offer", "ping", "now", "observe")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    ping: _control_pb2.Ping
    now: Now
    observe: Observe
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., ping: _Optional[_Union[_control_pb2.Ping, _Mapping]] = ..., now: _Optional[_Union[Now, _Mapping]] = ..., observe: _Optional[_Union[Observe, _Mapping]] = ...) -> None: ...

class PunchAnswer(_message.Message):
    __slots__ = ("offer", "pong", "busy", "rejected", "greet_first", "seen")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    GREET_FIRST_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    pong: _calls_pb2.Pong
    busy: _calls_pb2.Busy
    rejected: _calls_pb2.Rejected
    greet_first: _calls_pb2.GreetFirst
    seen: SeenPort
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., pong: _Optional[_Union[_calls_pb2.Pong, _Mapping]] = ..., busy: _Optional[_Union[_calls_pb2.Busy, _Mapping]] = ..., rejected: _Optional[_Union[_calls_pb2.Rejected, _Mapping]] = ..., greet_first: _Optional[_Union[_calls_pb2.GreetFirst, _Mapping]] = ..., seen: _Optional[_Union[SeenPort, _Mapping]] = ...) -> None: ...
