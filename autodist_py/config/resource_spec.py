"""Where a `ResourceSpec` comes from: the user's YAML, a number of local workers, or this machine.

It owns the YAML's schema (names and types) and how its errors read; what the values must satisfy is the rule of
`ResourceSpec` itself.
"""

import hashlib
import ipaddress
import os
import reprlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from autodist_py.config.settings import Settings
from autodist_py.proto.arguments import checked
from autodist_py.proto.checks import MOST_BITS, is_writable
from autodist_py.proto.errors import ResourceSpecError
from autodist_py.proto.resource_spec import MOST_BYTES, YAML_SUFFIXES, NodeSpec, ResourceSpec, SSHConfig, problem
from autodist_py.proto.text import first_repeated, known_names, shown

_FIRST_LOOPBACK = ipaddress.IPv4Address("127.0.0.1")
_MAX_LOCAL_WORKERS = 254
_MAX_LOCAL_CPUS = 1024
_SHOWN_CHARACTERS = 34
"""Of a line of a spec: a cause of one line has room for two."""
_MOST_BRACKETS = 32
_TOO_DEEP = "not a resource spec: it is nested too deeply; it has maps and lists of four levels"
_MOST_VALUES = 20_000


@checked("path", error=ResourceSpecError)
def load_resource_spec(path: str | os.PathLike[str]) -> ResourceSpec:
    """The spec in a file: YAML, or what `ResourceSpec.save` wrote.

    Raises:
        ResourceSpecError: the file is missing or no valid spec; it gives the YAML path, the value and the fix.
    """
    path = Path(path)
    if not path.is_file():
        raise ResourceSpecError(f"{path}: there is no such resource spec file; working directory: {Path.cwd()}")
    if path.suffix in (".pb", ".json"):
        return ResourceSpec.load(path)
    if path.suffix not in YAML_SUFFIXES:
        raise ResourceSpecError(f"{path}: a resource spec file ends in {', '.join(YAML_SUFFIXES)}, .pb or .json")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ResourceSpecError(f"{path}: a resource spec has at most {MOST_BYTES} bytes; this file has more")
    try:
        return parse_resource_spec(content.decode())
    except (ResourceSpecError, UnicodeDecodeError) as error:
        raise ResourceSpecError(f"{path}: {error}") from error


@checked("text", error=ResourceSpecError)
def parse_resource_spec(text: str) -> ResourceSpec:
    """The spec that a YAML text describes.

    Raises:
        ResourceSpecError: it gives the YAML path, the value and the fix, a line for each problem of the schema.
    """
    try:
        content = _yaml_content(text)
    except yaml.YAMLError as error:
        raise ResourceSpecError(f"not YAML: {error}") from error
    except RecursionError as error:
        raise ResourceSpecError(_TOO_DEEP) from error
    if content is None:
        raise ResourceSpecError("the resource spec is empty; write at least: nodes: [{address: 127.0.0.1}]")
    if not isinstance(content, dict):
        raise problem("the whole file", content, "a resource spec is a map with the keys nodes and ssh", "write nodes:")
    try:
        schema = _Spec.model_validate(content)
    except ValidationError as error:
        raise ResourceSpecError("\n".join(_explain(one) for one in error.errors())) from error
    return ResourceSpec(
        nodes=tuple(node.value() for node in schema.nodes),
        ssh=tuple((name, config.value()) for name, config in schema.ssh.items()),
    )


def spec_lines(resources: ResourceSpec) -> str:
    """All that a spec says, a line for each value, such as `nodes[1].cpus: (0, 1)`: equal specs have equal lines.

    Of `shared_envs` a digest stands there, as who compares sends the lines, and the values may be secret.
    """
    lines = [f"number of nodes: {len(resources.nodes)}", f"ssh groups: {[name for name, _ in resources.ssh]}"]
    parts: list[tuple[str, NodeSpec | SSHConfig]] = [
        (f"nodes[{index}]", node) for index, node in enumerate(resources.nodes)
    ]
    parts += [(f"ssh.{name}", config) for name, config in resources.ssh]
    lines += [f"{at}.{field.name}: {_shown(getattr(part, field.name))}" for at, part in parts for field in fields(part)]
    return "\n".join(lines)


def _shown(value: object) -> str:
    is_environment = isinstance(value, tuple) and bool(value) and isinstance(value[0], tuple)
    return f"sha256 {hashlib.sha256(repr(value).encode()).hexdigest()}" if is_environment else repr(value)


def first_difference(one: str, other: str) -> tuple[str, str]:
    """The first lines in which the `spec_lines` of two specs differ; of long ones, where they do."""
    pairs = zip_longest(one.splitlines(), other.splitlines(), fillvalue="nothing")
    first, second = next((pair for pair in pairs if pair[0] != pair[1]), ("nothing", "nothing"))
    differing = (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    at = next(differing, min(len(first), len(second)))
    return _around(at, first), _around(at, second)


def _around(at: int, line: str) -> str:
    if len(line) <= _SHOWN_CHARACTERS:
        return line
    begin = min(max(0, at - _SHOWN_CHARACTERS // 2), len(line) - _SHOWN_CHARACTERS // 2)
    end = begin + _SHOWN_CHARACTERS
    return f"{'...' if begin else ''}{line[begin:end]}{'...' if end < len(line) else ''}"


@checked("num_workers", "cpus_per_worker", error=ResourceSpecError)
def local_resource_spec(num_workers: int, cpus_per_worker: int | Sequence[int] = 1) -> ResourceSpec:
    """Workers as local processes, 127.0.0.1 (the chief), 127.0.0.2, ..., each with its number of CPU replicas.

    Raises:
        ResourceSpecError: the numbers are out of range, or not one per worker.
    """
    if not 1 <= num_workers <= _MAX_LOCAL_WORKERS:
        raise ResourceSpecError(f"local workers are 1 to {_MAX_LOCAL_WORKERS}; got {num_workers}")
    counts = [cpus_per_worker] * num_workers if isinstance(cpus_per_worker, int) else list(cpus_per_worker)
    if len(counts) != num_workers or not all(1 <= count <= _MAX_LOCAL_CPUS for count in counts):
        raise ResourceSpecError(
            f"each of {num_workers} workers needs a number of CPU devices from 1 to {_MAX_LOCAL_CPUS}; "
            f"got {reprlib.repr(counts)}"
        )
    return ResourceSpec(
        nodes=tuple(
            NodeSpec(address=str(_FIRST_LOOPBACK + rank), cpus=tuple(range(cpus)), chief=rank == 0)
            for rank, cpus in enumerate(counts)
        )
    )


def this_machine(num_gpus: int | None = None) -> ResourceSpec:
    """One worker here: on its GPUs, or on one CPU where it has none. TensorFlow counts them, unless told the number."""
    if num_gpus is None:
        import tensorflow as tf  # Here, since a spec is otherwise read without it.

        num_gpus = len(tf.config.list_physical_devices("GPU"))
    return ResourceSpec(nodes=(NodeSpec(address=str(_FIRST_LOOPBACK), gpus=tuple(range(num_gpus))),))


def given_resource_spec(given: str | os.PathLike[str] | ResourceSpec | None, settings: Settings) -> ResourceSpec | None:
    """The spec that the script, the environment or this machine gives; None: the chief tells this worker its own."""
    if settings.is_launched:
        return None
    if isinstance(given, ResourceSpec):
        return given
    path = given if given is not None else settings.resource_spec
    return this_machine() if path is None else load_resource_spec(path)


# -- The schema -------------------------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Node(_Strict):
    address: str
    gpus: list[int] = []
    cpus: list[int] = [0]
    chief: bool = False
    ssh_config: str | None = None
    network_bandwidth: float = 1.0

    def value(self) -> NodeSpec:
        lists = {"gpus": tuple(self.gpus), "cpus": tuple(self.cpus)}
        return NodeSpec(**{**self.model_dump(), **lists})


class _SSHConfig(_Strict):
    username: str = ""
    port: int = 22
    key_file: str | None = None
    python_venv: str | None = None
    shared_envs: dict[str, str] = {}

    def value(self) -> SSHConfig:
        return SSHConfig(**{**self.model_dump(), "shared_envs": tuple(self.shared_envs.items())})


class _Spec(_Strict):
    nodes: list[_Node]
    ssh: dict[str, _SSHConfig] = {}


_KEYS: Mapping[str, Sequence[str]] = {
    "": tuple(_Spec.model_fields),
    "nodes": tuple(_Node.model_fields),
    "ssh": tuple(_SSHConfig.model_fields),
}

# What is expected where, by the last key of the path: the rule, and what to write.
_EXPECTED: Mapping[str, tuple[str, str]] = {
    "nodes": ("nodes is a list of nodes", "write a list, such as: - address: 10.0.0.1"),
    "ssh": ("ssh is a map from name to settings", "write the settings under a name of your choice"),
    "address": ("an address is a text", "write one such as '10.0.0.1', in quotes"),
    "gpus": ("gpus is a list of device indices (integers)", "write one such as [0, 1]"),
    "cpus": ("cpus is a list of device indices (integers)", "write one such as [0, 1]"),
    "chief": ("chief is true or false", "write true for one node, without quotes"),
    "ssh_config": ("ssh_config is the name of an entry of `ssh`", "write a name"),
    "network_bandwidth": ("network_bandwidth is a number of Gbit/s", "write one such as 10, without a unit"),
    "username": ("username is a text", "put it in quotes"),
    "port": ("port is an integer", "write one such as 22, without quotes"),
    "key_file": ("key_file is a path", "put it in quotes"),
    "python_venv": ("python_venv is a path", "put it in quotes"),
    "shared_envs": ("shared_envs is a map from name to text", "put the value in quotes"),
}


def _explain(error: Mapping[str, Any]) -> str:
    """One line for one pydantic error: path, rule, value, fix."""
    location: tuple[int | str, ...] = error["loc"]
    path = _yaml_path(location)
    if error["type"] == "extra_forbidden":
        known = _KEYS[str(location[0]) if len(location) > 1 else ""]
        return f"{path}: there is no such key; got {shown(error['input'])}; {known_names(str(location[-1]), known)}"
    keys = [part for part in location if part in _EXPECTED]
    rule, fix = _EXPECTED[str(keys[-1])] if keys else ("this is not expected here", "see the documentation")
    if error["type"] == "missing":
        return f"{path}: this key is required; {fix}"
    return str(problem(path, error["input"], rule, fix))


def _yaml_path(location: Sequence[int | str]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".")


def _yaml_content(text: str) -> Any:
    """What the YAML says, as maps, lists and scalars."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _require_few_nodes(root)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _require_few_nodes(root: yaml.Node) -> None:
    """Refuse what an alias makes endless, or many times as large as the file: it is a tree from here on.

    Raises:
        ResourceSpecError: the number of values, written out.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in open_nodes:
            raise ResourceSpecError(
                f"line {node.start_mark.line + 1}: a value is part of itself, by an alias; write it out"
            )
        if id(node) not in sizes:
            open_nodes.add(id(node))
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            inner = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
            sizes[id(node)] = 1 + sum(size(one) for one in inner)
            open_nodes.remove(id(node))
        return sizes[id(node)]

    if (number := size(root)) > _MOST_VALUES:
        raise ResourceSpecError(
            f"a resource spec has at most {_MOST_VALUES} values, those that aliases repeat included; "
            f"this one has {number}"
        )


class _Loader(yaml.SafeLoader):
    """Plain values only; a key that comes twice is an error, not a silent choice of the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        repeated = first_repeated(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if repeated is not None:
            line = node.start_mark.line + 1
            raise ResourceSpecError(f"line {line}: the key {repeated!r} comes twice in one map; remove one")
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if not is_writable(value):
                raise ValueError(f"an integer of more than {MOST_BITS} bits")
            return value
        except ResourceSpecError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:  # PyYAML's constructors.
            raise ResourceSpecError(
                f"line {node.start_mark.line + 1}: YAML takes {reprlib.repr(node.value)} for a value of {node.tag}, "
                "which it is not; put a text in quotes"
            ) from error

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level >= _MOST_BRACKETS:  # PyYAML takes time that grows with the square of the depth.
            raise ResourceSpecError(_TOO_DEEP)
        super().fetch_flow_collection_start(TokenClass)
