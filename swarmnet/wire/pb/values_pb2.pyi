from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ballot(_message.Message):
    __slots__ = ("number", "peer")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    number: int
    peer: str
    def __init__(self, number: _Optional[int] = ..., peer: _Optional[str] = ...) -> None: ...

class RoundId(_message.Message):
    __slots__ = ("ballot", "number")
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ballot: Ballot
    number: int
    def __init__(self, ballot: _Optional[_Union[Ballot, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class Restart(_message.Message):
    __slots__ = ("number", "version")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    number: int
    version: int
    def __init__(self, number: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("incarnation", "number")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    number: int
    def __init__(self, incarnation: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Stamp(_message.Message):
    __slots__ = ("step", "stage", "chain", "restart")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    step: int
    stage: int
    chain: bytes
    restart: Restart
    def __init__(self, step: _Optional[int] = ..., stage: _Optional[int] = ..., chain: _Optional[bytes] = ..., restart: _Optional[_Union[Restart, _Mapping]] = ...) -> None: ...

class Contributions(_message.Message):
    __slots__ = ("peers", "incarnations", "numbers", "owners")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    peers: bytes
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    owners: bytes
    def __init__(self, peers: _Optional[bytes] = ..., incarnations: _Optional[_Iterable[int]] = ..., numbers: _Optional[_Iterable[int]] = ..., owners: _Optional[bytes] = ...) -> None: ...

class SignedMessage(_message.Message):
    __slots__ = ("kind", "payload", "key", "not_after", "signature")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    payload: bytes
    key: bytes
    not_after: int
    signature: bytes
    def __init__(self, kind: _Optional[str] = ..., payload: _Optional[bytes] = ..., key: _Optional[bytes] = ..., not_after: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Extension(_message.Message):
    __slots__ = ("run", "number", "since", "total_steps")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    number: int
    since: int
    total_steps: int
    def __init__(self, run: _Optional[bytes] = ..., number: _Optional[int] = ..., since: _Optional[int] = ..., total_steps: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("id", "digest", "num_tokens", "loss_sum", "grad_sq_norm", "contributions", "voided", "notice", "late", "bans")
    ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    GRAD_SQ_NORM_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    VOIDED_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    BANS_FIELD_NUMBER: _ClassVar[int]
    id: RoundId
    digest: bytes
    num_tokens: int
    loss_sum: float
    grad_sq_norm: float
    contributions: Contributions
    voided: bytes
    notice: SignedMessage
    late: _containers.RepeatedScalarFieldContainer[str]
    bans: _containers.RepeatedCompositeFieldContainer[Ban]
    def __init__(self, id: _Optional[_Union[RoundId, _Mapping]] = ..., digest: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., loss_sum: _Optional[float] = ..., grad_sq_norm: _Optional[float] = ..., contributions: _Optional[_Union[Contributions, _Mapping]] = ..., voided: _Optional[bytes] = ..., notice: _Optional[_Union[SignedMessage, _Mapping]] = ..., late: _Optional[_Iterable[str]] = ..., bans: _Optional[_Iterable[_Union[Ban, _Mapping]]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("stage", "step", "chain", "id", "digest", "num_tokens", "loss_sum", "grad_sq_norm", "voided", "contributors", "votes", "notice", "roll", "seats", "signatures", "late", "bans")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    GRAD_SQ_NORM_FIELD_NUMBER: _ClassVar[int]
    VOIDED_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    BANS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    step: int
    chain: bytes
    id: RoundId
    digest: bytes
    num_tokens: int
    loss_sum: float
    grad_sq_norm: float
    voided: bytes
    contributors: bytes
    votes: _containers.RepeatedCompositeFieldContainer[Vote]
    notice: SignedMessage
    roll: bytes
    seats: bytes
    signatures: _containers.RepeatedScalarFieldContainer[bytes]
    late: _containers.RepeatedScalarFieldContainer[str]
    bans: _containers.RepeatedCompositeFieldContainer[Ban]
    def __init__(self, stage: _Optional[int] = ..., step: _Optional[int] = ..., chain: _Optional[bytes] = ..., id: _Optional[_Union[RoundId, _Mapping]] = ..., digest: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., loss_sum: _Optional[float] = ..., grad_sq_norm: _Optional[float] = ..., voided: _Optional[bytes] = ..., contributors: _Optional[bytes] = ..., votes: _Optional[_Iterable[_Union[Vote, _Mapping]]] = ..., notice: _Optional[_Union[SignedMessage, _Mapping]] = ..., roll: _Optional[bytes] = ..., seats: _Optional[bytes] = ..., signatures: _Optional[_Iterable[bytes]] = ..., late: _Optional[_Iterable[str]] = ..., bans: _Optional[_Iterable[_Union[Ban, _Mapping]]] = ...) -> None: ...

class Ban(_message.Message):
    __slots__ = ("peer", "step", "case")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CASE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    step: int
    case: bytes
    def __init__(self, peer: _Optional[str] = ..., step: _Optional[int] = ..., case: _Optional[bytes] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("peer", "signature")
    PEER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    signature: bytes
    def __init__(self, peer: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("codec", "shape", "length")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    codec: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    length: int
    def __init__(self, codec: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., length: _Optional[int] = ...) -> None: ...

class Pledge(_message.Message):
    __slots__ = ("stamp", "id", "digest", "shares", "peer", "product", "work_root", "signature", "incarnation")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    WORK_ROOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    id: RoundId
    digest: bytes
    shares: bytes
    peer: str
    product: int
    work_root: bytes
    signature: bytes
    incarnation: int
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., id: _Optional[_Union[RoundId, _Mapping]] = ..., digest: _Optional[bytes] = ..., shares: _Optional[bytes] = ..., peer: _Optional[str] = ..., product: _Optional[int] = ..., work_root: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., incarnation: _Optional[int] = ...) -> None: ...

class WorkRecord(_message.Message):
    __slots__ = ("index", "input", "output", "gradient", "answer", "loss_sum", "num_tokens", "resent")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESENT_FIELD_NUMBER: _ClassVar[int]
    index: int
    input: bytes
    output: bytes
    gradient: bytes
    answer: bytes
    loss_sum: float
    num_tokens: int
    resent: bool
    def __init__(self, index: _Optional[int] = ..., input: _Optional[bytes] = ..., output: _Optional[bytes] = ..., gradient: _Optional[bytes] = ..., answer: _Optional[bytes] = ..., loss_sum: _Optional[float] = ..., num_tokens: _Optional[int] = ..., resent: _Optional[bool] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("stamp", "index", "kind", "digest", "peer", "again", "signature", "input", "gradient")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    index: int
    kind: str
    digest: bytes
    peer: str
    again: bool
    signature: bytes
    input: bytes
    gradient: bytes
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., index: _Optional[int] = ..., kind: _Optional[str] = ..., digest: _Optional[bytes] = ..., peer: _Optional[str] = ..., again: _Optional[bool] = ..., signature: _Optional[bytes] = ..., input: _Optional[bytes] = ..., gradient: _Optional[bytes] = ...) -> None: ...

class Recheck(_message.Message):
    __slots__ = ("peer", "found", "signature")
    PEER_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    found: bytes
    signature: bytes
    def __init__(self, peer: _Optional[str] = ..., found: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Case(_message.Message):
    __slots__ = ("pledge", "work", "path", "sent", "other", "numerics", "rechecks", "contributions", "voided")
    PLEDGE_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    RECHECKS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    VOIDED_FIELD_NUMBER: _ClassVar[int]
    pledge: Pledge
    work: WorkRecord
    path: bytes
    sent: Sent
    other: Pledge
    numerics: str
    rechecks: _containers.RepeatedCompositeFieldContainer[Recheck]
    contributions: Contributions
    voided: bytes
    def __init__(self, pledge: _Optional[_Union[Pledge, _Mapping]] = ..., work: _Optional[_Union[WorkRecord, _Mapping]] = ..., path: _Optional[bytes] = ..., sent: _Optional[_Union[Sent, _Mapping]] = ..., other: _Optional[_Union[Pledge, _Mapping]] = ..., numerics: _Optional[str] = ..., rechecks: _Optional[_Iterable[_Union[Recheck, _Mapping]]] = ..., contributions: _Optional[_Union[Contributions, _Mapping]] = ..., voided: _Optional[bytes] = ...) -> None: ...
