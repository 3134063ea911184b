from swarmnet.wire.pb import values_pb2 as _values_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Announcement(_message.Message):
    __slots__ = ("record", "place", "num_stages", "dht", "parts")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    DHT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    record: Record
    place: str
    num_stages: int
    dht: _containers.RepeatedScalarFieldContainer[str]
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, record: _Optional[_Union[Record, _Mapping]] = ..., place: _Optional[str] = ..., num_stages: _Optional[int] = ..., dht: _Optional[_Iterable[str]] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("run", "peer", "incarnation", "addresses", "stages", "trainer", "numerics", "loss", "eval_loss", "tokens_per_second", "finished", "halted", "restart", "wants", "invitation", "complaints", "estimates", "may_move", "going", "surely", "paused", "steps", "step_s", "software", "region", "tainted", "num_tainted", "disputed", "num_disputed", "goes_back")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    HALTED_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    COMPLAINTS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    MAY_MOVE_FIELD_NUMBER: _ClassVar[int]
    GOING_FIELD_NUMBER: _ClassVar[int]
    SURELY_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    TAINTED_FIELD_NUMBER: _ClassVar[int]
    NUM_TAINTED_FIELD_NUMBER: _ClassVar[int]
    DISPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DISPUTED_FIELD_NUMBER: _ClassVar[int]
    GOES_BACK_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    peer: str
    incarnation: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    stages: _containers.RepeatedCompositeFieldContainer[StageStatus]
    trainer: bool
    numerics: str
    loss: LossAt
    eval_loss: LossAt
    tokens_per_second: float
    finished: bool
    halted: int
    restart: _values_pb2.Restart
    wants: _values_pb2.Restart
    invitation: _values_pb2.SignedMessage
    complaints: _containers.RepeatedCompositeFieldContainer[Complaint]
    estimates: _containers.RepeatedCompositeFieldContainer[Estimate]
    may_move: bool
    going: int
    surely: bool
    paused: bool
    steps: int
    step_s: float
    software: str
    region: str
    tainted: _containers.RepeatedCompositeFieldContainer[TaintedStep]
    num_tainted: int
    disputed: DisputedWork
    num_disputed: int
    goes_back: bool
    def __init__(self, run: _Optional[bytes] = ..., peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., stages: _Optional[_Iterable[_Union[StageStatus, _Mapping]]] = ..., trainer: _Optional[bool] = ..., numerics: _Optional[str] = ..., loss: _Optional[_Union[LossAt, _Mapping]] = ..., eval_loss: _Optional[_Union[LossAt, _Mapping]] = ..., tokens_per_second: _Optional[float] = ..., finished: _Optional[bool] = ..., halted: _Optional[int] = ..., restart: _Optional[_Union[_values_pb2.Restart, _Mapping]] = ..., wants: _Optional[_Union[_values_pb2.Restart, _Mapping]] = ..., invitation: _Optional[_Union[_values_pb2.SignedMessage, _Mapping]] = ..., complaints: _Optional[_Iterable[_Union[Complaint, _Mapping]]] = ..., estimates: _Optional[_Iterable[_Union[Estimate, _Mapping]]] = ..., may_move: _Optional[bool] = ..., going: _Optional[int] = ..., surely: _Optional[bool] = ..., paused: _Optional[bool] = ..., steps: _Optional[int] = ..., step_s: _Optional[float] = ..., software: _Optional[str] = ..., region: _Optional[str] = ..., tainted: _Optional[_Iterable[_Union[TaintedStep, _Mapping]]] = ..., num_tainted: _Optional[int] = ..., disputed: _Optional[_Union[DisputedWork, _Mapping]] = ..., num_disputed: _Optional[int] = ..., goes_back: _Optional[bool] = ...) -> None: ...

class StageStatus(_message.Message):
    __slots__ = ("stage", "version", "chain", "synced", "queue", "slots", "disk", "draining", "executions", "counted", "drift", "stray", "still_s")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    STRAY_FIELD_NUMBER: _ClassVar[int]
    STILL_S_FIELD_NUMBER: _ClassVar[int]
    stage: int
    version: int
    chain: bytes
    synced: bool
    queue: int
    slots: int
    disk: _containers.RepeatedCompositeFieldContainer[OnDisk]
    draining: bool
    executions: int
    counted: int
    drift: int
    stray: bool
    still_s: int
    def __init__(self, stage: _Optional[int] = ..., version: _Optional[int] = ..., chain: _Optional[bytes] = ..., synced: _Optional[bool] = ..., queue: _Optional[int] = ..., slots: _Optional[int] = ..., disk: _Optional[_Iterable[_Union[OnDisk, _Mapping]]] = ..., draining: _Optional[bool] = ..., executions: _Optional[int] = ..., counted: _Optional[int] = ..., drift: _Optional[int] = ..., stray: _Optional[bool] = ..., still_s: _Optional[int] = ...) -> None: ...

class LossAt(_message.Message):
    __slots__ = ("step", "loss")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class OnDisk(_message.Message):
    __slots__ = ("version", "restart")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    version: int
    restart: _values_pb2.Restart
    def __init__(self, version: _Optional[int] = ..., restart: _Optional[_Union[_values_pb2.Restart, _Mapping]] = ...) -> None: ...

class Complaint(_message.Message):
    __slots__ = ("stage", "peer", "how", "reason", "seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    peer: str
    how: str
    reason: str
    seconds: int
    def __init__(self, stage: _Optional[int] = ..., peer: _Optional[str] = ..., how: _Optional[str] = ..., reason: _Optional[str] = ..., seconds: _Optional[int] = ...) -> None: ...

class Estimate(_message.Message):
    __slots__ = ("mark", "rate")
    MARK_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    mark: int
    rate: int
    def __init__(self, mark: _Optional[int] = ..., rate: _Optional[int] = ...) -> None: ...

class TaintedStep(_message.Message):
    __slots__ = ("stage", "step")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    stage: int
    step: int
    def __init__(self, stage: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class DisputedWork(_message.Message):
    __slots__ = ("stage", "step", "peer")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    stage: int
    step: int
    peer: str
    def __init__(self, stage: _Optional[int] = ..., step: _Optional[int] = ..., peer: _Optional[str] = ...) -> None: ...

class Bans(_message.Message):
    __slots__ = ("run", "number", "peers")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    number: int
    peers: bytes
    def __init__(self, run: _Optional[bytes] = ..., number: _Optional[int] = ..., peers: _Optional[bytes] = ...) -> None: ...

class Invitation(_message.Message):
    __slots__ = ("run", "guest", "roles", "bearer", "uses")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GUEST_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    BEARER_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    guest: bytes
    roles: _containers.RepeatedScalarFieldContainer[str]
    bearer: bool
    uses: int
    def __init__(self, run: _Optional[bytes] = ..., guest: _Optional[bytes] = ..., roles: _Optional[_Iterable[str]] = ..., bearer: _Optional[bool] = ..., uses: _Optional[int] = ...) -> None: ...

class BearerPass(_message.Message):
    __slots__ = ("peer", "invitation")
    PEER_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    invitation: _values_pb2.SignedMessage
    def __init__(self, peer: _Optional[bytes] = ..., invitation: _Optional[_Union[_values_pb2.SignedMessage, _Mapping]] = ...) -> None: ...
