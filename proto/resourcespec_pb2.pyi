from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ResourceSpec(_message.Message):
    __slots__ = ("nodes", "ssh")
    class Node(_message.Message):
        __slots__ = ("address", "gpus", "cpus", "chief", "ssh_config", "network_bandwidth")
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        GPUS_FIELD_NUMBER: _ClassVar[int]
        CPUS_FIELD_NUMBER: _ClassVar[int]
        CHIEF_FIELD_NUMBER: _ClassVar[int]
        SSH_CONFIG_FIELD_NUMBER: _ClassVar[int]
        NETWORK_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
        address: str
        gpus: _containers.RepeatedScalarFieldContainer[int]
        cpus: _containers.RepeatedScalarFieldContainer[int]
        chief: bool
        ssh_config: str
        network_bandwidth: float
        def __init__(self, address: _Optional[str] = ..., gpus: _Optional[_Iterable[int]] = ..., cpus: _Optional[_Iterable[int]] = ..., chief: _Optional[bool] = ..., ssh_config: _Optional[str] = ..., network_bandwidth: _Optional[float] = ...) -> None: ...
    class SSHConfig(_message.Message):
        __slots__ = ("username", "port", "key_file", "python_venv", "shared_envs")
        class SharedEnvsEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        USERNAME_FIELD_NUMBER: _ClassVar[int]
        PORT_FIELD_NUMBER: _ClassVar[int]
        KEY_FILE_FIELD_NUMBER: _ClassVar[int]
        PYTHON_VENV_FIELD_NUMBER: _ClassVar[int]
        SHARED_ENVS_FIELD_NUMBER: _ClassVar[int]
        username: str
        port: int
        key_file: str
        python_venv: str
        shared_envs: _containers.ScalarMap[str, str]
        def __init__(self, username: _Optional[str] = ..., port: _Optional[int] = ..., key_file: _Optional[str] = ..., python_venv: _Optional[str] = ..., shared_envs: _Optional[_Mapping[str, str]] = ...) -> None: ...
    class SshEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ResourceSpec.SSHConfig
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ResourceSpec.SSHConfig, _Mapping]] = ...) -> None: ...
    NODES_FIELD_NUMBER: _ClassVar[int]
    SSH_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[ResourceSpec.Node]
    ssh: _containers.MessageMap[str, ResourceSpec.SSHConfig]
    def __init__(self, nodes: _Optional[_Iterable[_Union[ResourceSpec.Node, _Mapping]]] = ..., ssh: _Optional[_Mapping[str, ResourceSpec.SSHConfig]] = ...) -> None: ...
