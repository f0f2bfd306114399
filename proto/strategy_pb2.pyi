from autodist_py.proto import synchronizers_pb2 as _synchronizers_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Strategy(_message.Message):
    __slots__ = ("id", "path", "node_config", "graph_config")
    class Node(_message.Message):
        __slots__ = ("var_name", "PSSynchronizer", "AllReduceSynchronizer", "partitioner", "part_config", "part_sizes")
        VAR_NAME_FIELD_NUMBER: _ClassVar[int]
        PSSYNCHRONIZER_FIELD_NUMBER: _ClassVar[int]
        ALLREDUCESYNCHRONIZER_FIELD_NUMBER: _ClassVar[int]
        PARTITIONER_FIELD_NUMBER: _ClassVar[int]
        PART_CONFIG_FIELD_NUMBER: _ClassVar[int]
        PART_SIZES_FIELD_NUMBER: _ClassVar[int]
        var_name: str
        PSSynchronizer: _synchronizers_pb2.PSSynchronizer
        AllReduceSynchronizer: _synchronizers_pb2.AllReduceSynchronizer
        partitioner: str
        part_config: _containers.RepeatedCompositeFieldContainer[Strategy.Node]
        part_sizes: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, var_name: _Optional[str] = ..., PSSynchronizer: _Optional[_Union[_synchronizers_pb2.PSSynchronizer, _Mapping]] = ..., AllReduceSynchronizer: _Optional[_Union[_synchronizers_pb2.AllReduceSynchronizer, _Mapping]] = ..., partitioner: _Optional[str] = ..., part_config: _Optional[_Iterable[_Union[Strategy.Node, _Mapping]]] = ..., part_sizes: _Optional[_Iterable[int]] = ...) -> None: ...
    class GraphConfig(_message.Message):
        __slots__ = ("replicas",)
        REPLICAS_FIELD_NUMBER: _ClassVar[int]
        replicas: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, replicas: _Optional[_Iterable[str]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NODE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    GRAPH_CONFIG_FIELD_NUMBER: _ClassVar[int]
    id: str
    path: str
    node_config: _containers.RepeatedCompositeFieldContainer[Strategy.Node]
    graph_config: Strategy.GraphConfig
    def __init__(self, id: _Optional[str] = ..., path: _Optional[str] = ..., node_config: _Optional[_Iterable[_Union[Strategy.Node, _Mapping]]] = ..., graph_config: _Optional[_Union[Strategy.GraphConfig, _Mapping]] = ...) -> None: ...
