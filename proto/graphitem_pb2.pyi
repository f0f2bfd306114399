from google.protobuf import any_pb2 as _any_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GraphItem(_message.Message):
    __slots__ = ("graph_def", "grad_target_pairs", "info", "variables", "gradients", "inputs", "outputs", "run_ops", "loss_reduction", "statistics", "local_ops", "inseparable_ops", "normalizing_ops", "mixtures", "replicas_to_aggregate", "first_tokens")
    class GradTargetPairsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class Info(_message.Message):
        __slots__ = ("variables", "table_initializers", "savers")
        VARIABLES_FIELD_NUMBER: _ClassVar[int]
        TABLE_INITIALIZERS_FIELD_NUMBER: _ClassVar[int]
        SAVERS_FIELD_NUMBER: _ClassVar[int]
        variables: _containers.RepeatedCompositeFieldContainer[_any_pb2.Any]
        table_initializers: _containers.RepeatedScalarFieldContainer[str]
        savers: _containers.RepeatedCompositeFieldContainer[_any_pb2.Any]
        def __init__(self, variables: _Optional[_Iterable[_Union[_any_pb2.Any, _Mapping]]] = ..., table_initializers: _Optional[_Iterable[str]] = ..., savers: _Optional[_Iterable[_Union[_any_pb2.Any, _Mapping]]] = ...) -> None: ...
    class VariableInfo(_message.Message):
        __slots__ = ("name", "dtype", "shape", "trainable", "aggregation", "update_ops", "per_replica")
        NAME_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        SHAPE_FIELD_NUMBER: _ClassVar[int]
        TRAINABLE_FIELD_NUMBER: _ClassVar[int]
        AGGREGATION_FIELD_NUMBER: _ClassVar[int]
        UPDATE_OPS_FIELD_NUMBER: _ClassVar[int]
        PER_REPLICA_FIELD_NUMBER: _ClassVar[int]
        name: str
        dtype: str
        shape: _containers.RepeatedScalarFieldContainer[int]
        trainable: bool
        aggregation: str
        update_ops: _containers.RepeatedScalarFieldContainer[str]
        per_replica: bool
        def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., trainable: _Optional[bool] = ..., aggregation: _Optional[str] = ..., update_ops: _Optional[_Iterable[str]] = ..., per_replica: _Optional[bool] = ...) -> None: ...
    class Gradient(_message.Message):
        __slots__ = ("variable", "tensors", "reduction", "indices", "rows", "in_parts")
        VARIABLE_FIELD_NUMBER: _ClassVar[int]
        TENSORS_FIELD_NUMBER: _ClassVar[int]
        REDUCTION_FIELD_NUMBER: _ClassVar[int]
        INDICES_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        IN_PARTS_FIELD_NUMBER: _ClassVar[int]
        variable: str
        tensors: _containers.RepeatedScalarFieldContainer[str]
        reduction: str
        indices: str
        rows: int
        in_parts: bool
        def __init__(self, variable: _Optional[str] = ..., tensors: _Optional[_Iterable[str]] = ..., reduction: _Optional[str] = ..., indices: _Optional[str] = ..., rows: _Optional[int] = ..., in_parts: _Optional[bool] = ...) -> None: ...
    class Dimension(_message.Message):
        __slots__ = ("size",)
        SIZE_FIELD_NUMBER: _ClassVar[int]
        size: int
        def __init__(self, size: _Optional[int] = ...) -> None: ...
    class Shape(_message.Message):
        __slots__ = ("dimensions",)
        DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
        dimensions: _containers.RepeatedCompositeFieldContainer[GraphItem.Dimension]
        def __init__(self, dimensions: _Optional[_Iterable[_Union[GraphItem.Dimension, _Mapping]]] = ...) -> None: ...
    class Input(_message.Message):
        __slots__ = ("name", "dtype", "shape", "batched", "kind", "batch")
        NAME_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        SHAPE_FIELD_NUMBER: _ClassVar[int]
        BATCHED_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        BATCH_FIELD_NUMBER: _ClassVar[int]
        name: str
        dtype: str
        shape: GraphItem.Shape
        batched: bool
        kind: str
        batch: int
        def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Union[GraphItem.Shape, _Mapping]] = ..., batched: _Optional[bool] = ..., kind: _Optional[str] = ..., batch: _Optional[int] = ...) -> None: ...
    class Output(_message.Message):
        __slots__ = ("tensor", "dtype", "shape", "reduction", "per_replica")
        TENSOR_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        SHAPE_FIELD_NUMBER: _ClassVar[int]
        REDUCTION_FIELD_NUMBER: _ClassVar[int]
        PER_REPLICA_FIELD_NUMBER: _ClassVar[int]
        tensor: str
        dtype: str
        shape: GraphItem.Shape
        reduction: str
        per_replica: bool
        def __init__(self, tensor: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Union[GraphItem.Shape, _Mapping]] = ..., reduction: _Optional[str] = ..., per_replica: _Optional[bool] = ...) -> None: ...
    class Statistic(_message.Message):
        __slots__ = ("tensor", "dtype", "shape", "reduction")
        TENSOR_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        SHAPE_FIELD_NUMBER: _ClassVar[int]
        REDUCTION_FIELD_NUMBER: _ClassVar[int]
        tensor: str
        dtype: str
        shape: GraphItem.Shape
        reduction: str
        def __init__(self, tensor: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Union[GraphItem.Shape, _Mapping]] = ..., reduction: _Optional[str] = ...) -> None: ...
    GRAPH_DEF_FIELD_NUMBER: _ClassVar[int]
    GRAD_TARGET_PAIRS_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    RUN_OPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_REDUCTION_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_OPS_FIELD_NUMBER: _ClassVar[int]
    INSEPARABLE_OPS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZING_OPS_FIELD_NUMBER: _ClassVar[int]
    MIXTURES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_TO_AGGREGATE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    graph_def: _any_pb2.Any
    grad_target_pairs: _containers.ScalarMap[str, str]
    info: GraphItem.Info
    variables: _containers.RepeatedCompositeFieldContainer[GraphItem.VariableInfo]
    gradients: _containers.RepeatedCompositeFieldContainer[GraphItem.Gradient]
    inputs: _containers.RepeatedCompositeFieldContainer[GraphItem.Input]
    outputs: _containers.RepeatedCompositeFieldContainer[GraphItem.Output]
    run_ops: _containers.RepeatedScalarFieldContainer[str]
    loss_reduction: str
    statistics: _containers.RepeatedCompositeFieldContainer[GraphItem.Statistic]
    local_ops: _containers.RepeatedScalarFieldContainer[str]
    inseparable_ops: _containers.RepeatedScalarFieldContainer[str]
    normalizing_ops: _containers.RepeatedScalarFieldContainer[str]
    mixtures: _containers.RepeatedScalarFieldContainer[str]
    replicas_to_aggregate: int
    first_tokens: int
    def __init__(self, graph_def: _Optional[_Union[_any_pb2.Any, _Mapping]] = ..., grad_target_pairs: _Optional[_Mapping[str, str]] = ..., info: _Optional[_Union[GraphItem.Info, _Mapping]] = ..., variables: _Optional[_Iterable[_Union[GraphItem.VariableInfo, _Mapping]]] = ..., gradients: _Optional[_Iterable[_Union[GraphItem.Gradient, _Mapping]]] = ..., inputs: _Optional[_Iterable[_Union[GraphItem.Input, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[GraphItem.Output, _Mapping]]] = ..., run_ops: _Optional[_Iterable[str]] = ..., loss_reduction: _Optional[str] = ..., statistics: _Optional[_Iterable[_Union[GraphItem.Statistic, _Mapping]]] = ..., local_ops: _Optional[_Iterable[str]] = ..., inseparable_ops: _Optional[_Iterable[str]] = ..., normalizing_ops: _Optional[_Iterable[str]] = ..., mixtures: _Optional[_Iterable[str]] = ..., replicas_to_aggregate: _Optional[int] = ..., first_tokens: _Optional[int] = ...) -> None: ...
