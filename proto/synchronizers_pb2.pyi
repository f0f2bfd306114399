from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PSSynchronizer(_message.Message):
    __slots__ = ("reduction_destination", "local_replication", "sync", "staleness", "replicas_to_aggregate", "compressor", "group", "compressor_arguments", "compressor_name", "first_tokens")
    REDUCTION_DESTINATION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_REPLICATION_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_TO_AGGREGATE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reduction_destination: str
    local_replication: bool
    sync: bool
    staleness: int
    replicas_to_aggregate: int
    compressor: int
    group: int
    compressor_arguments: str
    compressor_name: str
    first_tokens: int
    def __init__(self, reduction_destination: _Optional[str] = ..., local_replication: _Optional[bool] = ..., sync: _Optional[bool] = ..., staleness: _Optional[int] = ..., replicas_to_aggregate: _Optional[int] = ..., compressor: _Optional[int] = ..., group: _Optional[int] = ..., compressor_arguments: _Optional[str] = ..., compressor_name: _Optional[str] = ..., first_tokens: _Optional[int] = ...) -> None: ...

class AllReduceSynchronizer(_message.Message):
    __slots__ = ("spec", "compressor", "group", "bytes_per_pack", "compressor_arguments", "compressor_name", "timeout_seconds", "sparse_as_dense", "local", "factors")
    class Spec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        AUTO: _ClassVar[AllReduceSynchronizer.Spec]
        NCCL: _ClassVar[AllReduceSynchronizer.Spec]
        RING: _ClassVar[AllReduceSynchronizer.Spec]
        HOROVOD: _ClassVar[AllReduceSynchronizer.Spec]
    AUTO: AllReduceSynchronizer.Spec
    NCCL: AllReduceSynchronizer.Spec
    RING: AllReduceSynchronizer.Spec
    HOROVOD: AllReduceSynchronizer.Spec
    class Compressor(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NoneCompressor: _ClassVar[AllReduceSynchronizer.Compressor]
        HorovodCompressor: _ClassVar[AllReduceSynchronizer.Compressor]
        HorovodCompressorEF: _ClassVar[AllReduceSynchronizer.Compressor]
        PowerSGDCompressor: _ClassVar[AllReduceSynchronizer.Compressor]
        TopKCompressor: _ClassVar[AllReduceSynchronizer.Compressor]
        Int8Compressor: _ClassVar[AllReduceSynchronizer.Compressor]
        OtherCompressor: _ClassVar[AllReduceSynchronizer.Compressor]
    NoneCompressor: AllReduceSynchronizer.Compressor
    HorovodCompressor: AllReduceSynchronizer.Compressor
    HorovodCompressorEF: AllReduceSynchronizer.Compressor
    PowerSGDCompressor: AllReduceSynchronizer.Compressor
    TopKCompressor: AllReduceSynchronizer.Compressor
    Int8Compressor: AllReduceSynchronizer.Compressor
    OtherCompressor: AllReduceSynchronizer.Compressor
    class Local(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        one_device: _ClassVar[AllReduceSynchronizer.Local]
        hierarchical: _ClassVar[AllReduceSynchronizer.Local]
        nccl: _ClassVar[AllReduceSynchronizer.Local]
    one_device: AllReduceSynchronizer.Local
    hierarchical: AllReduceSynchronizer.Local
    nccl: AllReduceSynchronizer.Local
    SPEC_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_PACK_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSOR_NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_AS_DENSE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    FACTORS_FIELD_NUMBER: _ClassVar[int]
    spec: AllReduceSynchronizer.Spec
    compressor: AllReduceSynchronizer.Compressor
    group: int
    bytes_per_pack: int
    compressor_arguments: str
    compressor_name: str
    timeout_seconds: float
    sparse_as_dense: bool
    local: AllReduceSynchronizer.Local
    factors: bool
    def __init__(self, spec: _Optional[_Union[AllReduceSynchronizer.Spec, str]] = ..., compressor: _Optional[_Union[AllReduceSynchronizer.Compressor, str]] = ..., group: _Optional[int] = ..., bytes_per_pack: _Optional[int] = ..., compressor_arguments: _Optional[str] = ..., compressor_name: _Optional[str] = ..., timeout_seconds: _Optional[float] = ..., sparse_as_dense: _Optional[bool] = ..., local: _Optional[_Union[AllReduceSynchronizer.Local, str]] = ..., factors: _Optional[bool] = ...) -> None: ...
