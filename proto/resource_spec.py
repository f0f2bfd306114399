"""`ResourceSpec`: on what it is trained. The nodes, their devices, and how to reach them.

It owns the value, its rules, its wire and text forms; `autodist_py.config.resource_spec` reads the YAML that users
write. Its errors give the place as a path into that YAML, such as `nodes[1].gpus`.
"""

import ipaddress
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import yaml

from autodist_py.proto import resourcespec_pb2 as pb
from autodist_py.proto import wire
from autodist_py.proto.arguments import check_fields, checked
from autodist_py.proto.checks import MAX_INT32
from autodist_py.proto.errors import ResourceSpecError
from autodist_py.proto.text import count, known_names, short, shown, table

YAML_SUFFIXES = (".yml", ".yaml")

MOST_BYTES = 256 << 10
"""Of a file: thousands of nodes."""

Environment = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SSHConfig:
    """How to reach a node over SSH; what is empty or None, the user's own ssh configuration says.

    `python_venv` is activated, and `shared_envs` (kept sorted by name) are set, before the script starts.
    """

    username: str = ""
    port: int = 22
    key_file: str | None = None
    python_venv: str | None = None
    shared_envs: Environment = ()

    def __post_init__(self) -> None:
        check_fields(self, error=ResourceSpecError)
        object.__setattr__(self, "key_file", self.key_file or None)
        object.__setattr__(self, "python_venv", self.python_venv or None)
        object.__setattr__(self, "shared_envs", tuple(sorted(dict(self.shared_envs).items())))


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One machine. Its devices are given by index; `network_bandwidth` is in Gbit/s.

    Its values are checked as a part of its spec, where its place is known; their types at once.

    Raises:
        ResourceSpecError: a field is of another type.
    """

    address: str
    gpus: tuple[int, ...] = ()
    cpus: tuple[int, ...] = (0,)
    chief: bool = False
    ssh_config: str | None = None
    network_bandwidth: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, error=ResourceSpecError)

    @property
    def is_loopback(self) -> bool:
        """Whether the address is this machine's, such as 127.0.0.2, whichever machine that is."""
        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return self.address == "localhost"

    @property
    def replica_devices(self) -> tuple[str, ...]:
        """The devices that hold a replica: the GPUs, or the CPUs of a node without GPUs, by index."""
        kind, indices = ("GPU", self.gpus) if self.gpus else ("CPU", self.cpus)
        return tuple(f"{self.address}:{kind}:{index}" for index in sorted(indices))

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device; CPU:0 is always there."""
        cpus = sorted({0, *self.cpus})
        return (
            *(f"{self.address}:CPU:{index}" for index in cpus),
            *(f"{self.address}:GPU:{index}" for index in sorted(self.gpus)),
        )


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """The nodes in the order given, and the SSH groups they name, sorted by name. A single node is the chief.

    Raises:
        ResourceSpecError: it gives the path, the value and the fix.
    """

    nodes: tuple[NodeSpec, ...]
    ssh: tuple[tuple[str, SSHConfig], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.nodes, list):
            object.__setattr__(self, "nodes", tuple(self.nodes))
        check_fields(self, error=ResourceSpecError)
        nodes, groups = self.nodes, dict(self.ssh)
        if len(nodes) == 1:
            nodes = (replace(nodes[0], chief=True),)
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "ssh", tuple(sorted(groups.items())))
        _check_nodes(nodes)
        _check_chief(nodes)
        _check_ssh(nodes, groups)

    @property
    def workers(self) -> tuple[NodeSpec, ...]:
        """The nodes by rank: the chief, then the others in the order given."""
        return tuple(sorted(self.nodes, key=lambda node: not node.chief))

    @property
    def chief(self) -> NodeSpec:
        """The node of rank 0."""
        return self.workers[0]

    @property
    def replica_devices(self) -> tuple[str, ...]:
        """The devices that hold a replica, such as `10.0.0.1:GPU:0`, by rank, then by index."""
        return tuple(device for node in self.workers for device in node.replica_devices)

    @property
    def server_devices(self) -> tuple[str, ...]:
        """The devices that may hold parameter-server variables, by rank: CPU:0 of each node."""
        return tuple(f"{node.address}:CPU:0" for node in self.workers)

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device of every node, by rank."""
        return tuple(device for node in self.workers for device in node.devices)

    @property
    def is_local(self) -> bool:
        """Whether every address is a loopback one, so that workers are local processes."""
        return all(node.is_loopback for node in self.nodes)

    @property
    def fingerprint(self) -> str:
        """sha256 of the wire form, as hexadecimal digits: equal specs have equal fingerprints."""
        return wire.content_hash(self.to_proto())

    def ssh_config(self, node: NodeSpec) -> SSHConfig:
        """The SSH group that the node names, or the defaults."""
        return SSHConfig() if node.ssh_config is None else dict(self.ssh)[node.ssh_config]

    def to_proto(self) -> pb.ResourceSpec:
        """The wire form."""
        message = pb.ResourceSpec(
            nodes=[
                pb.ResourceSpec.Node(
                    address=node.address,
                    gpus=node.gpus,
                    cpus=node.cpus,
                    chief=node.chief,
                    ssh_config=node.ssh_config or "",
                    network_bandwidth=node.network_bandwidth,
                )
                for node in self.nodes
            ]
        )
        for name, config in self.ssh:
            message.ssh[name].CopyFrom(
                pb.ResourceSpec.SSHConfig(
                    username=config.username,
                    port=config.port,
                    key_file=config.key_file or "",
                    python_venv=config.python_venv or "",
                    shared_envs=dict(config.shared_envs),
                )
            )
        return message

    @classmethod
    def from_proto(cls, message: pb.ResourceSpec) -> "ResourceSpec":
        """The value of a message that `to_proto` made.

        Raises:
            ResourceSpecError: the message is no valid spec.
        """
        return cls(
            nodes=tuple(
                NodeSpec(
                    address=node.address,
                    gpus=tuple(node.gpus),
                    cpus=tuple(node.cpus),
                    chief=node.chief,
                    ssh_config=node.ssh_config or None,
                    network_bandwidth=node.network_bandwidth,
                )
                for node in message.nodes
            ),
            ssh=tuple(
                (
                    name,
                    SSHConfig(
                        username=config.username,
                        port=config.port,
                        key_file=config.key_file or None,
                        python_venv=config.python_venv or None,
                        shared_envs=tuple(config.shared_envs.items()),
                    ),
                )
                for name, config in message.ssh.items()
            ),
        )

    def to_yaml(self) -> str:
        """The YAML that `autodist_py.config.resource_spec` reads back as an equal spec; what is empty is left out."""
        content: dict[str, object] = wire.to_plain(self.to_proto())
        return str(yaml.safe_dump(content, sort_keys=False))

    @checked("path", error=ResourceSpecError)
    def save(self, path: str | os.PathLike[str]) -> None:
        """The spec is in the file: binary (`.pb`), JSON (`.json`) or YAML (`.yml`, `.yaml`)."""
        if os.fspath(path).endswith(YAML_SUFFIXES):
            wire.write_atomically(path, self.to_yaml().encode())
        else:
            wire.save(self.to_proto(), path, error=ResourceSpecError)

    @classmethod
    @checked("path", error=ResourceSpecError)
    def load(cls, path: str | os.PathLike[str]) -> "ResourceSpec":
        """The spec that `save` wrote as binary or JSON; YAML is for `load_resource_spec`."""
        return cls.from_proto(wire.load(pb.ResourceSpec, path, error=ResourceSpecError, most_bytes=MOST_BYTES))

    def __str__(self) -> str:
        rows = (
            (
                f"{rank} (chief)" if node.chief else rank,
                node.address,
                " ".join(device.removeprefix(f"{node.address}:") for device in node.replica_devices),
                f"{node.network_bandwidth:g} Gbit/s",
                node.ssh_config or "",
            )
            for rank, node in enumerate(self.workers)
        )
        title = (
            f"ResourceSpec {short(self.fingerprint)}: {count(len(self.nodes), 'node')}, "
            f"{count(len(self.replica_devices), 'replica')}"
        )
        return f"{title}\n\n{table(('rank', 'node', 'replicas', 'bandwidth', 'ssh'), rows)}"


def problem(path: str, value: object, rule: str, fix: str) -> ResourceSpecError:
    """The error for the value at a path into the YAML: the rule it breaks, and what to do."""
    return ResourceSpecError(f"{path}: {rule}; got {shown(value)}; {fix}")


# -- The rules --------------------------------------------------------------------------------------------------------


def _check_nodes(nodes: tuple[NodeSpec, ...]) -> None:
    if not nodes:
        raise problem("nodes", [], "a resource spec has at least one node", "add one, such as: - address: 127.0.0.1")
    seen: dict[str, int] = {}
    for index, node in enumerate(nodes):
        at = f"nodes[{index}]"
        _check_node(node, at)
        if node.address in seen:
            first = f"nodes[{seen[node.address]}]"
            fix = f"join the two nodes into one, or use another address (this one is that of {first})"
            raise problem(f"{at}.address", node.address, "an address stands for one node", fix)
        seen[node.address] = index
    if len({node.is_loopback for node in nodes}) > 1:
        index = next(index for index, node in enumerate(nodes) if node.is_loopback)
        rule = "loopback addresses and real ones do not mix, since other machines cannot reach a loopback address"
        raise problem(f"nodes[{index}].address", nodes[index].address, rule, "write this machine's network address")


def _check_node(node: NodeSpec, at: str) -> None:
    if not _is_address(node.address):
        fix = "write one such as 10.0.0.1 or host.example.org, without a port"
        raise problem(f"{at}.address", node.address, "an address is an IP address or a host name", fix)
    if not node.cpus:
        fix = "leave cpus out, or write [0]"
        raise problem(f"{at}.cpus", [], "a node has at least one CPU device", fix)
    for kind, indices in (("gpus", node.gpus), ("cpus", node.cpus)):
        for position, index in _wrong_indices(indices):
            rule = "device indices are integers >= 0, each named once"
            raise problem(f"{at}.{kind}[{position}]", index, rule, "remove it, or write another index")
    if not 0 < node.network_bandwidth < float("inf"):
        fix = "write Gbit/s, such as 10"
        raise problem(f"{at}.network_bandwidth", node.network_bandwidth, "a bandwidth is a number > 0", fix)


def _is_address(text: str) -> bool:
    # A name must not start with `-`, which ssh would take for an option.
    if re.fullmatch(r"\w[\w.-]*", text):
        return True
    address, _, zone = text.partition("%")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return address == text or re.fullmatch(r"[\w.-]+", zone) is not None


_NO_USERNAME = re.compile(r"""-|.*[\s'"`;&<>|(){}]|.*\\$""", re.DOTALL)
"""How a name begins that is no user's: a shell would read commands in it, as ssh's configuration may give it to one."""


def _wrong_indices(indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    seen: Counter[int] = Counter()
    for position, index in enumerate(indices):
        seen[index] += 1
        if not 0 <= index <= MAX_INT32 or seen[index] > 1:
            yield position, index


def _check_chief(nodes: tuple[NodeSpec, ...]) -> None:
    chiefs = [index for index, node in enumerate(nodes) if node.chief]
    if not chiefs:
        fix = "add `chief: true` to the node you start the script on"
        raise problem("nodes[*].chief", False, f"of several nodes one is the chief, none of {len(nodes)} is", fix)
    if len(chiefs) > 1:
        fix = f"remove it here or at nodes[{chiefs[0]}]"
        raise problem(f"nodes[{chiefs[1]}].chief", True, "one node is the chief", fix)


def _check_ssh(nodes: tuple[NodeSpec, ...], groups: Mapping[str, SSHConfig]) -> None:
    for name, config in groups.items():
        if not name:
            raise problem("ssh", name, "an entry of `ssh` has a name", "write one of your choice")
        if not 0 < config.port < 65536:
            raise problem(f"ssh.{name}.port", config.port, "a port is between 1 and 65535", "22 is the usual one")
        if _NO_USERNAME.match(config.username):
            rule = "a username has no spaces, quotes, brackets or signs of a shell, and begins with no `-`"
            raise problem(f"ssh.{name}.username", config.username, rule, "write the login name on that node")
        for variable, value in config.shared_envs:
            if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
                rule = "the name of a variable has letters, digits and underscores, and begins with no digit"
                raise problem(f"ssh.{name}.shared_envs", variable, rule, "write one such as LD_LIBRARY_PATH")
            if "\0" in value:
                rule = "the value of a variable has no NUL character"
                raise problem(f"ssh.{name}.shared_envs.{variable}", value, rule, "leave it out")
    for index, node in enumerate(nodes):
        if node.ssh_config is not None and node.ssh_config not in groups:
            rule = "an ssh_config names an entry of `ssh`"
            fix = known_names(node.ssh_config, groups) if groups else "add an `ssh` section that has it"
            raise problem(f"nodes[{index}].ssh_config", node.ssh_config, rule, fix)
