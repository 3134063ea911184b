from swarmnet.wire.pb import values_pb2 as _values_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Heartbeat(_message.Message):
    __slots__ = ("stamp", "incarnation", "synced", "leader", "commits", "last_commits", "queue", "draining", "before", "numerics", "measure", "late", "unreached", "new", "asks", "known", "digest", "notices", "wants")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMITS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    stamp: _values_pb2.Stamp
    incarnation: int
    synced: bool
    leader: _values_pb2.Ballot
    commits: _containers.RepeatedCompositeFieldContainer[_values_pb2.Commit]
    last_commits: _containers.RepeatedCompositeFieldContainer[_values_pb2.Commit]
    queue: int
    draining: bool
    before: bytes
    numerics: str
    measure: Measure
    late: _containers.RepeatedScalarFieldContainer[str]
    unreached: _containers.RepeatedScalarFieldContainer[str]
    new: bool
    asks: bool
    known: bytes
    digest: bytes
    notices: bytes
    wants: bytes
    def __init__(self, stamp: _Optional[_Union[_values_pb2.Stamp, _Mapping]] = ..., incarnation: _Optional[int] = ..., synced: _Optional[bool] = ..., leader: _Optional[_Union[_values_pb2.Ballot, _Mapping]] = ..., commits: _Optional[_Iterable[_Union[_values_pb2.Commit, _Mapping]]] = ..., last_commits: _Optional[_Iterable[_Union[_values_pb2.Commit, _Mapping]]] = ..., queue: _Optional[int] = ..., draining: _Optional[bool] = ..., before: _Optional[bytes] = ..., numerics: _Optional[str] = ..., measure: _Optional[_Union[Measure, _Mapping]] = ..., late: _Optional[_Iterable[str]] = ..., unreached: _Optional[_Iterable[str]] = ..., new: _Optional[bool] = ..., asks: _Optional[bool] = ..., known: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., notices: _Optional[bytes] = ..., wants: _Optional[bytes] = ...) -> None: ...

class Measure(_message.Message):
    __slots__ = ("version", "chain", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    chain: bytes
    digest: bytes
    def __init__(self, version: _Optional[int] = ..., chain: _Optional[bytes] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Line(_message.Message):
    __slots__ = ("bytes_per_s", "round_trips", "relayed", "busy")
    class RoundTrip(_message.Message):
        __slots__ = ("peer", "microseconds")
        PEER_FIELD_NUMBER: _ClassVar[int]
        MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
        peer: str
        microseconds: int
        def __init__(self, peer: _Optional[str] = ..., microseconds: _Optional[int] = ...) -> None: ...
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIPS_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    bytes_per_s: int
    round_trips: _containers.RepeatedCompositeFieldContainer[Line.RoundTrip]
    relayed: bool
    busy: bool
    def __init__(self, bytes_per_s: _Optional[int] = ..., round_trips: _Optional[_Iterable[_Union[Line.RoundTrip, _Mapping]]] = ..., relayed: _Optional[bool] = ..., busy: _Optional[bool] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("id", "late", "refused")
    class Late(_message.Message):
        __slots__ = ("peer", "owes", "allowed_s")
        PEER_FIELD_NUMBER: _ClassVar[int]
        OWES_FIELD_NUMBER: _ClassVar[int]
        ALLOWED_S_FIELD_NUMBER: _ClassVar[int]
        peer: str
        owes: bool
        allowed_s: float
        def __init__(self, peer: _Optional[str] = ..., owes: _Optional[bool] = ..., allowed_s: _Optional[float] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    id: _values_pb2.RoundId
    late: _containers.RepeatedCompositeFieldContainer[Trouble.Late]
    refused: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[_Union[_values_pb2.RoundId, _Mapping]] = ..., late: _Optional[_Iterable[_Union[Trouble.Late, _Mapping]]] = ..., refused: _Optional[_Iterable[str]] = ...) -> None: ...

class MemberState(_message.Message):
    __slots__ = ("stamp", "ballot", "generation", "owned", "summed", "ack", "commit", "progress", "non_finite", "line", "trouble", "vote", "whole", "revision", "round", "wants", "returns", "awaits")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    AWAITS_FIELD_NUMBER: _ClassVar[int]
    stamp: _values_pb2.Stamp
    ballot: _values_pb2.Ballot
    generation: _values_pb2.Generation
    owned: bytes
    summed: bytes
    ack: _values_pb2.Commit
    commit: _values_pb2.Commit
    progress: int
    non_finite: bytes
    line: Line
    trouble: Trouble
    vote: bytes
    whole: bool
    revision: int
    round: int
    wants: bytes
    returns: bytes
    awaits: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stamp: _Optional[_Union[_values_pb2.Stamp, _Mapping]] = ..., ballot: _Optional[_Union[_values_pb2.Ballot, _Mapping]] = ..., generation: _Optional[_Union[_values_pb2.Generation, _Mapping]] = ..., owned: _Optional[bytes] = ..., summed: _Optional[bytes] = ..., ack: _Optional[_Union[_values_pb2.Commit, _Mapping]] = ..., commit: _Optional[_Union[_values_pb2.Commit, _Mapping]] = ..., progress: _Optional[int] = ..., non_finite: _Optional[bytes] = ..., line: _Optional[_Union[Line, _Mapping]] = ..., trouble: _Optional[_Union[Trouble, _Mapping]] = ..., vote: _Optional[bytes] = ..., whole: _Optional[bool] = ..., revision: _Optional[int] = ..., round: _Optional[int] = ..., wants: _Optional[bytes] = ..., returns: _Optional[bytes] = ..., awaits: _Optional[_Iterable[str]] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("stamp", "id", "contributions", "receivers", "holders", "voided", "bandwidths", "rows", "notice", "late", "bans")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    VOIDED_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTHS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    BANS_FIELD_NUMBER: _ClassVar[int]
    stamp: _values_pb2.Stamp
    id: _values_pb2.RoundId
    contributions: _values_pb2.Contributions
    receivers: bytes
    holders: bytes
    voided: bytes
    bandwidths: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    notice: _values_pb2.SignedMessage
    late: _containers.RepeatedScalarFieldContainer[str]
    bans: _containers.RepeatedCompositeFieldContainer[_values_pb2.Ban]
    def __init__(self, stamp: _Optional[_Union[_values_pb2.Stamp, _Mapping]] = ..., id: _Optional[_Union[_values_pb2.RoundId, _Mapping]] = ..., contributions: _Optional[_Union[_values_pb2.Contributions, _Mapping]] = ..., receivers: _Optional[bytes] = ..., holders: _Optional[bytes] = ..., voided: _Optional[bytes] = ..., bandwidths: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., notice: _Optional[_Union[_values_pb2.SignedMessage, _Mapping]] = ..., late: _Optional[_Iterable[str]] = ..., bans: _Optional[_Iterable[_Union[_values_pb2.Ban, _Mapping]]] = ...) -> None: ...

class StagePlan(_message.Message):
    __slots__ = ("stamp", "ballot", "generation", "assigned", "moved", "evicted", "execute", "attempt", "given", "whole", "awaits")
    class Moved(_message.Message):
        __slots__ = ("index", "assignee")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        ASSIGNEE_FIELD_NUMBER: _ClassVar[int]
        index: int
        assignee: str
        def __init__(self, index: _Optional[int] = ..., assignee: _Optional[str] = ...) -> None: ...
    STAMP_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    AWAITS_FIELD_NUMBER: _ClassVar[int]
    stamp: _values_pb2.Stamp
    ballot: _values_pb2.Ballot
    generation: _values_pb2.Generation
    assigned: bytes
    moved: _containers.RepeatedCompositeFieldContainer[StagePlan.Moved]
    evicted: str
    execute: bytes
    attempt: Round
    given: bytes
    whole: bool
    awaits: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stamp: _Optional[_Union[_values_pb2.Stamp, _Mapping]] = ..., ballot: _Optional[_Union[_values_pb2.Ballot, _Mapping]] = ..., generation: _Optional[_Union[_values_pb2.Generation, _Mapping]] = ..., assigned: _Optional[bytes] = ..., moved: _Optional[_Iterable[_Union[StagePlan.Moved, _Mapping]]] = ..., evicted: _Optional[str] = ..., execute: _Optional[bytes] = ..., attempt: _Optional[_Union[Round, _Mapping]] = ..., given: _Optional[bytes] = ..., whole: _Optional[bool] = ..., awaits: _Optional[_Iterable[str]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("commit", "restart")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    commit: _values_pb2.Commit
    restart: _values_pb2.Restart
    def __init__(self, commit: _Optional[_Union[_values_pb2.Commit, _Mapping]] = ..., restart: _Optional[_Union[_values_pb2.Restart, _Mapping]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("heartbeat", "stage_plan", "member_state", "committed", "ping", "case", "sent")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STAGE_PLAN_FIELD_NUMBER: _ClassVar[int]
    MEMBER_STATE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    CASE_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    heartbeat: Heartbeat
    stage_plan: StagePlan
    member_state: MemberState
    committed: Committed
    ping: Ping
    case: _values_pb2.Case
    sent: _values_pb2.Sent
    def __init__(self, heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., stage_plan: _Optional[_Union[StagePlan, _Mapping]] = ..., member_state: _Optional[_Union[MemberState, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., case: _Optional[_Union[_values_pb2.Case, _Mapping]] = ..., sent: _Optional[_Union[_values_pb2.Sent, _Mapping]] = ...) -> None: ...
