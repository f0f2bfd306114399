from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("rank", "server", "spec", "timeout_seconds")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    server: str
    spec: str
    timeout_seconds: float
    def __init__(self, rank: _Optional[int] = ..., server: _Optional[str] = ..., spec: _Optional[str] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("run_id", "seed", "servers")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    seed: int
    servers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., seed: _Optional[int] = ..., servers: _Optional[_Iterable[str]] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("rank", "key", "kind", "value", "timeout_seconds")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CHIEF: _ClassVar[ExchangeRequest.Kind]
        ALL: _ClassVar[ExchangeRequest.Kind]
    CHIEF: ExchangeRequest.Kind
    ALL: ExchangeRequest.Kind
    RANK_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    key: str
    kind: ExchangeRequest.Kind
    value: bytes
    timeout_seconds: float
    def __init__(self, rank: _Optional[int] = ..., key: _Optional[str] = ..., kind: _Optional[_Union[ExchangeRequest.Kind, str]] = ..., value: _Optional[bytes] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: bytes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[int, bytes]
    def __init__(self, values: _Optional[_Mapping[int, bytes]] = ...) -> None: ...

class HearRequest(_message.Message):
    __slots__ = ("rank", "key", "step", "position", "timeout_seconds")
    RANK_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    key: str
    step: int
    position: int
    timeout_seconds: float
    def __init__(self, rank: _Optional[int] = ..., key: _Optional[str] = ..., step: _Optional[int] = ..., position: _Optional[int] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class HearReply(_message.Message):
    __slots__ = ("announced", "value")
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    announced: bool
    value: bytes
    def __init__(self, announced: _Optional[bool] = ..., value: _Optional[bytes] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("rank", "step", "limit_seconds", "waits_in", "step_together", "stopped_in")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITS_IN_FIELD_NUMBER: _ClassVar[int]
    STEP_TOGETHER_FIELD_NUMBER: _ClassVar[int]
    STOPPED_IN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    limit_seconds: float
    waits_in: str
    step_together: int
    stopped_in: str
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ..., limit_seconds: _Optional[float] = ..., waits_in: _Optional[str] = ..., step_together: _Optional[int] = ..., stopped_in: _Optional[str] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("cause", "finished", "lost", "suspicion")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    cause: str
    finished: bool
    lost: _containers.RepeatedScalarFieldContainer[int]
    suspicion: str
    def __init__(self, cause: _Optional[str] = ..., finished: _Optional[bool] = ..., lost: _Optional[_Iterable[int]] = ..., suspicion: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("rank", "event", "detail", "step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    event: str
    detail: str
    step: int
    def __init__(self, rank: _Optional[int] = ..., event: _Optional[str] = ..., detail: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    def __init__(self, cause: _Optional[str] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("rank", "step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
