from swarmnet.wire.pb import values_pb2 as _values_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Process(_message.Message):
    __slots__ = ("step", "stage", "index", "purpose", "hedge", "repair", "avoid", "sents")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    HEDGE_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    SENTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    stage: int
    index: int
    purpose: str
    hedge: bool
    repair: bool
    avoid: bytes
    sents: _containers.RepeatedCompositeFieldContainer[_values_pb2.Sent]
    def __init__(self, step: _Optional[int] = ..., stage: _Optional[int] = ..., index: _Optional[int] = ..., purpose: _Optional[str] = ..., hedge: _Optional[bool] = ..., repair: _Optional[bool] = ..., avoid: _Optional[bytes] = ..., sents: _Optional[_Iterable[_Union[_values_pb2.Sent, _Mapping]]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("step", "stage", "index", "kind", "cached")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    step: int
    stage: int
    index: int
    kind: str
    cached: bool
    def __init__(self, step: _Optional[int] = ..., stage: _Optional[int] = ..., index: _Optional[int] = ..., kind: _Optional[str] = ..., cached: _Optional[bool] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("stamp", "id", "kind", "start", "stop", "hop", "reference")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    stamp: _values_pb2.Stamp
    id: _values_pb2.RoundId
    kind: str
    start: int
    stop: int
    hop: int
    reference: bytes
    def __init__(self, stamp: _Optional[_Union[_values_pb2.Stamp, _Mapping]] = ..., id: _Optional[_Union[_values_pb2.RoundId, _Mapping]] = ..., kind: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., hop: _Optional[int] = ..., reference: _Optional[bytes] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("stage", "version", "content", "piece")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    stage: int
    version: int
    content: bytes
    piece: int
    def __init__(self, stage: _Optional[int] = ..., version: _Optional[int] = ..., content: _Optional[bytes] = ..., piece: _Optional[int] = ...) -> None: ...

class TrailRequest(_message.Message):
    __slots__ = ("stamp",)
    STAMP_FIELD_NUMBER: _ClassVar[int]
    stamp: _values_pb2.Stamp
    def __init__(self, stamp: _Optional[_Union[_values_pb2.Stamp, _Mapping]] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("step", "stage", "index", "peer", "bare", "made")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    BARE_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    step: int
    stage: int
    index: int
    peer: str
    bare: bool
    made: bool
    def __init__(self, step: _Optional[int] = ..., stage: _Optional[int] = ..., index: _Optional[int] = ..., peer: _Optional[str] = ..., bare: _Optional[bool] = ..., made: _Optional[bool] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DialBack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LineTest(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class LineTested(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HistoryRequest(_message.Message):
    __slots__ = ("since",)
    SINCE_FIELD_NUMBER: _ClassVar[int]
    since: int
    def __init__(self, since: _Optional[int] = ...) -> None: ...

class Lane(_message.Message):
    __slots__ = ("session", "connection", "call")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    connection: int
    call: int
    def __init__(self, session: _Optional[bytes] = ..., connection: _Optional[int] = ..., call: _Optional[int] = ...) -> None: ...

class CallHeader(_message.Message):
    __slots__ = ("process", "fetch", "part", "snapshot", "manifest", "trail", "dial_back", "line_test", "history", "audit", "lane", "payload")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TRAIL_FIELD_NUMBER: _ClassVar[int]
    DIAL_BACK_FIELD_NUMBER: _ClassVar[int]
    LINE_TEST_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    process: Process
    fetch: Fetch
    part: Part
    snapshot: SnapshotRequest
    manifest: ManifestRequest
    trail: TrailRequest
    dial_back: DialBack
    line_test: LineTest
    history: HistoryRequest
    audit: AuditRequest
    lane: Lane
    payload: _containers.RepeatedCompositeFieldContainer[_values_pb2.Tensor]
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., manifest: _Optional[_Union[ManifestRequest, _Mapping]] = ..., trail: _Optional[_Union[TrailRequest, _Mapping]] = ..., dial_back: _Optional[_Union[DialBack, _Mapping]] = ..., line_test: _Optional[_Union[LineTest, _Mapping]] = ..., history: _Optional[_Union[HistoryRequest, _Mapping]] = ..., audit: _Optional[_Union[AuditRequest, _Mapping]] = ..., lane: _Optional[_Union[Lane, _Mapping]] = ..., payload: _Optional[_Iterable[_Union[_values_pb2.Tensor, _Mapping]]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Running(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Busy(_message.Message):
    __slots__ = ("retry_after_s", "version")
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    retry_after_s: float
    version: int
    def __init__(self, retry_after_s: _Optional[float] = ..., version: _Optional[int] = ...) -> None: ...

class MovedTo(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: str
    def __init__(self, owner: _Optional[str] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("code", "reason", "version")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    code: str
    reason: str
    version: int
    def __init__(self, code: _Optional[str] = ..., reason: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class Gradient(_message.Message):
    __slots__ = ("loss_sum", "num_tokens", "compute_s", "route", "sents")
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    SENTS_FIELD_NUMBER: _ClassVar[int]
    loss_sum: float
    num_tokens: int
    compute_s: float
    route: bytes
    sents: _containers.RepeatedCompositeFieldContainer[_values_pb2.Sent]
    def __init__(self, loss_sum: _Optional[float] = ..., num_tokens: _Optional[int] = ..., compute_s: _Optional[float] = ..., route: _Optional[bytes] = ..., sents: _Optional[_Iterable[_Union[_values_pb2.Sent, _Mapping]]] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("loss_sum", "num_tokens", "sents")
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENTS_FIELD_NUMBER: _ClassVar[int]
    loss_sum: float
    num_tokens: int
    sents: _containers.RepeatedCompositeFieldContainer[_values_pb2.Sent]
    def __init__(self, loss_sum: _Optional[float] = ..., num_tokens: _Optional[int] = ..., sents: _Optional[_Iterable[_Union[_values_pb2.Sent, _Mapping]]] = ...) -> None: ...

class Losses(_message.Message):
    __slots__ = ("indexes", "loss_sum", "num_tokens")
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    indexes: bytes
    loss_sum: _containers.RepeatedScalarFieldContainer[float]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, indexes: _Optional[bytes] = ..., loss_sum: _Optional[_Iterable[float]] = ..., num_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class PartData(_message.Message):
    __slots__ = ("losses", "finished", "pledges")
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PLEDGES_FIELD_NUMBER: _ClassVar[int]
    losses: Losses
    finished: _values_pb2.Finished
    pledges: _containers.RepeatedCompositeFieldContainer[_values_pb2.Pledge]
    def __init__(self, losses: _Optional[_Union[Losses, _Mapping]] = ..., finished: _Optional[_Union[_values_pb2.Finished, _Mapping]] = ..., pledges: _Optional[_Iterable[_Union[_values_pb2.Pledge, _Mapping]]] = ...) -> None: ...

class AuditData(_message.Message):
    __slots__ = ("work", "path", "sents")
    WORK_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SENTS_FIELD_NUMBER: _ClassVar[int]
    work: _values_pb2.WorkRecord
    path: bytes
    sents: _containers.RepeatedCompositeFieldContainer[_values_pb2.Sent]
    def __init__(self, work: _Optional[_Union[_values_pb2.WorkRecord, _Mapping]] = ..., path: _Optional[bytes] = ..., sents: _Optional[_Iterable[_Union[_values_pb2.Sent, _Mapping]]] = ...) -> None: ...

class Exclusion(_message.Message):
    __slots__ = ("peer", "until_step", "level")
    PEER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_STEP_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    peer: str
    until_step: int
    level: int
    def __init__(self, peer: _Optional[str] = ..., until_step: _Optional[int] = ..., level: _Optional[int] = ...) -> None: ...

class StateHeader(_message.Message):
    __slots__ = ("version", "chain", "before", "term_chain", "restart", "notices", "exclusions")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    TERM_CHAIN_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIONS_FIELD_NUMBER: _ClassVar[int]
    version: int
    chain: bytes
    before: bytes
    term_chain: bytes
    restart: _values_pb2.Restart
    notices: _containers.RepeatedCompositeFieldContainer[_values_pb2.SignedMessage]
    exclusions: _containers.RepeatedCompositeFieldContainer[Exclusion]
    def __init__(self, version: _Optional[int] = ..., chain: _Optional[bytes] = ..., before: _Optional[bytes] = ..., term_chain: _Optional[bytes] = ..., restart: _Optional[_Union[_values_pb2.Restart, _Mapping]] = ..., notices: _Optional[_Iterable[_Union[_values_pb2.SignedMessage, _Mapping]]] = ..., exclusions: _Optional[_Iterable[_Union[Exclusion, _Mapping]]] = ...) -> None: ...

class Content(_message.Message):
    __slots__ = ("num_bytes", "piece_bytes", "digests")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    piece_bytes: int
    digests: bytes
    def __init__(self, num_bytes: _Optional[int] = ..., piece_bytes: _Optional[int] = ..., digests: _Optional[bytes] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("stage", "header", "content")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    stage: int
    header: StateHeader
    content: Content
    def __init__(self, stage: _Optional[int] = ..., header: _Optional[_Union[StateHeader, _Mapping]] = ..., content: _Optional[_Union[Content, _Mapping]] = ...) -> None: ...

class SnapshotPiece(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrailStep(_message.Message):
    __slots__ = ("finished", "commits", "last_commits")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMITS_FIELD_NUMBER: _ClassVar[int]
    finished: _values_pb2.Finished
    commits: _containers.RepeatedCompositeFieldContainer[_values_pb2.Commit]
    last_commits: _containers.RepeatedCompositeFieldContainer[_values_pb2.Commit]
    def __init__(self, finished: _Optional[_Union[_values_pb2.Finished, _Mapping]] = ..., commits: _Optional[_Iterable[_Union[_values_pb2.Commit, _Mapping]]] = ..., last_commits: _Optional[_Iterable[_Union[_values_pb2.Commit, _Mapping]]] = ...) -> None: ...

class ManifestData(_message.Message):
    __slots__ = ("toml", "notices")
    TOML_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    toml: str
    notices: _containers.RepeatedCompositeFieldContainer[_values_pb2.SignedMessage]
    def __init__(self, toml: _Optional[str] = ..., notices: _Optional[_Iterable[_Union[_values_pb2.SignedMessage, _Mapping]]] = ...) -> None: ...

class StepFigures(_message.Message):
    __slots__ = ("step", "loss_sum", "num_tokens", "grad_norm", "learning_rate", "ago_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss_sum: float
    num_tokens: int
    grad_norm: float
    learning_rate: float
    ago_s: float
    def __init__(self, step: _Optional[int] = ..., loss_sum: _Optional[float] = ..., num_tokens: _Optional[int] = ..., grad_norm: _Optional[float] = ..., learning_rate: _Optional[float] = ..., ago_s: _Optional[float] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("version", "loss")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    version: int
    loss: float
    def __init__(self, version: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class PhaseTime(_message.Message):
    __slots__ = ("began_s", "ended_s", "busy_s")
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    began_s: float
    ended_s: float
    busy_s: float
    def __init__(self, began_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., busy_s: _Optional[float] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("stage", "step", "ago_s", "seconds", "update", "forward", "backward", "averaging", "barrier")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    stage: int
    step: int
    ago_s: float
    seconds: float
    update: PhaseTime
    forward: PhaseTime
    backward: PhaseTime
    averaging: PhaseTime
    barrier: PhaseTime
    def __init__(self, stage: _Optional[int] = ..., step: _Optional[int] = ..., ago_s: _Optional[float] = ..., seconds: _Optional[float] = ..., update: _Optional[_Union[PhaseTime, _Mapping]] = ..., forward: _Optional[_Union[PhaseTime, _Mapping]] = ..., backward: _Optional[_Union[PhaseTime, _Mapping]] = ..., averaging: _Optional[_Union[PhaseTime, _Mapping]] = ..., barrier: _Optional[_Union[PhaseTime, _Mapping]] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("figures", "evaluations", "times")
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    figures: _containers.RepeatedCompositeFieldContainer[StepFigures]
    evaluations: _containers.RepeatedCompositeFieldContainer[Evaluation]
    times: _containers.RepeatedCompositeFieldContainer[StepTimes]
    def __init__(self, figures: _Optional[_Iterable[_Union[StepFigures, _Mapping]]] = ..., evaluations: _Optional[_Iterable[_Union[Evaluation, _Mapping]]] = ..., times: _Optional[_Iterable[_Union[StepTimes, _Mapping]]] = ...) -> None: ...

class DialledBack(_message.Message):
    __slots__ = ("reached", "reason")
    REACHED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    reached: bool
    reason: str
    def __init__(self, reached: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class GreetFirst(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pulse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class Told(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: bytes
    def __init__(self, message: _Optional[bytes] = ...) -> None: ...

class AnswerHeader(_message.Message):
    __slots__ = ("accepted", "running", "busy", "moved_to", "rejected", "gradient", "fetched", "part", "snapshot", "manifest", "snapshot_piece", "done", "greet_first", "pulse", "trail", "pong", "dialled_back", "told", "line_tested", "history", "audit", "lane", "payload")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    MOVED_TO_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_PIECE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    GREET_FIRST_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    TRAIL_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DIALLED_BACK_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    LINE_TESTED_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    running: Running
    busy: Busy
    moved_to: MovedTo
    rejected: Rejected
    gradient: Gradient
    fetched: Fetched
    part: PartData
    snapshot: Snapshot
    manifest: ManifestData
    snapshot_piece: SnapshotPiece
    done: Done
    greet_first: GreetFirst
    pulse: Pulse
    trail: TrailStep
    pong: Pong
    dialled_back: DialledBack
    told: Told
    line_tested: LineTested
    history: History
    audit: AuditData
    lane: Lane
    payload: _containers.RepeatedCompositeFieldContainer[_values_pb2.Tensor]
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., running: _Optional[_Union[Running, _Mapping]] = ..., busy: _Optional[_Union[Busy, _Mapping]] = ..., moved_to: _Optional[_Union[MovedTo, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., gradient: _Optional[_Union[Gradient, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ..., part: _Optional[_Union[PartData, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., manifest: _Optional[_Union[ManifestData, _Mapping]] = ..., snapshot_piece: _Optional[_Union[SnapshotPiece, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., greet_first: _Optional[_Union[GreetFirst, _Mapping]] = ..., pulse: _Optional[_Union[Pulse, _Mapping]] = ..., trail: _Optional[_Union[TrailStep, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., dialled_back: _Optional[_Union[DialledBack, _Mapping]] = ..., told: _Optional[_Union[Told, _Mapping]] = ..., line_tested: _Optional[_Union[LineTested, _Mapping]] = ..., history: _Optional[_Union[History, _Mapping]] = ..., audit: _Optional[_Union[AuditData, _Mapping]] = ..., lane: _Optional[_Union[Lane, _Mapping]] = ..., payload: _Optional[_Iterable[_Union[_values_pb2.Tensor, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("run", "major", "minor", "numerics", "clock", "software", "completed", "filled_in", "boot_id", "invitation")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FILLED_IN_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    major: int
    minor: int
    numerics: str
    clock: float
    software: str
    completed: bytes
    filled_in: str
    boot_id: int
    invitation: _values_pb2.SignedMessage
    def __init__(self, run: _Optional[bytes] = ..., major: _Optional[int] = ..., minor: _Optional[int] = ..., numerics: _Optional[str] = ..., clock: _Optional[float] = ..., software: _Optional[str] = ..., completed: _Optional[bytes] = ..., filled_in: _Optional[str] = ..., boot_id: _Optional[int] = ..., invitation: _Optional[_Union[_values_pb2.SignedMessage, _Mapping]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("hello", "rejected")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    rejected: Rejected
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ...) -> None: ...

class BulkAsk(_message.Message):
    __slots__ = ("secret",)
    SECRET_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    def __init__(self, secret: _Optional[bytes] = ...) -> None: ...

class BulkOffer(_message.Message):
    __slots__ = ("port", "session", "secret")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    port: int
    session: bytes
    secret: bytes
    def __init__(self, port: _Optional[int] = ..., session: _Optional[bytes] = ..., secret: _Optional[bytes] = ...) -> None: ...
