"""The kinds of hostile inputs, which `test_fuzz_inputs.py` tries: valid values, how one is changed, what reads it."""

import base64
import json
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml
from click.testing import CliRunner
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from autodist_py import cli
from autodist_py.cluster.coordinator.service import _Service
from autodist_py.cluster.launch.told import Told
from autodist_py.config import settings as environment
from autodist_py.config.resource_spec import load_resource_spec, parse_resource_spec
from autodist_py.config.settings import Settings
from autodist_py.proto import coordinator_pb2, wire
from autodist_py.proto.errors import AutoDistError
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Output, Statistic, Variable
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec, SSHConfig
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from autodist_py.proto.values import load_value
from autodist_py.strategy_builders.base import build_strategy, builder_locations, resolve_builder
from autodist_py.strategy_builders.from_file import FromFile
from tests.support.coordinators import make_coordinator
from tests.support.hostile_inputs import any_message, any_scalar, changed_bytes, changed_message, changed_plain


class Hostile(NamedTuple):
    """An input as it is shown, what reads it, and of how many bytes it is, where these may be many."""

    shown: object
    read: Callable[[], object]
    size: int = 0


# -- Valid values, which are changed ----------------------------------------------------------------------------------

ITEM = GraphItem(
    graph_def=b"\x0a\x05\x0a\x01x\x12\x00",
    variables=(
        Variable("dense/kernel", "float32", (784, 10), update_ops=("update",)),
        Variable("dense/bias", "float32", (10,), aggregation="MEAN"),
        Variable("table", "float64", (1000, 64)),
        Variable("steps", "int64", (), trainable=False),
    ),
    gradients=(
        Gradient("dense/kernel", ("g:0",), "mean"),
        Gradient("dense/bias", ("h:0",), in_parts=True),
        Gradient("table", ("i:0", "v:0", "s:0"), "sum", "same", 8),
    ),
    inputs=(
        Input("x", "float32", (None, 784), batched=True),
        Input("rate", "float32", (), batched=False, kind="state"),
    ),
    outputs=(Output("loss:0", "float32", (), "mean"), Output("y:0", "float32", None, "rows")),
    run_ops=("train",),
    table_initializers=("fill",),
    savers=(b"saver",),
    statistics=(Statistic("count:0", "int64", (None, 3), "rows"),),
    local_ops=("unique",),
    mixtures=("a loss of pairs",),
)
RESOURCES = ResourceSpec(
    (
        NodeSpec("10.0.0.1", gpus=(0, 1), chief=True, ssh_config="lab", network_bandwidth=10.0),
        NodeSpec("10.0.0.2", cpus=(0, 1, 2), ssh_config="lab"),
        NodeSpec("host.example.org"),
    ),
    (("lab", SSHConfig("ada", 2222, "~/.ssh/id", "~/venv", (("PATH", "/bin"), ("LANG", "C")))),),
)
BUILDERS = (
    *(name for name in builder_locations() if name not in ("FromFile", "PerVariable")),
    "FromFile(path='strategy.json')",
    "PS(staleness=2, sync=True)",
    "PSLoadBalancing(local_proxy_variable=True, replicas_to_aggregate=1)",
    "PartitionedPS(min_shard_bytes=1)",
    "UnevenPartitionedPS(min_shard_bytes=1024)",
    "AllReduce(chunk_size=2, all_reduce_spec='RING', compressor='HorovodCompressor', timeout_seconds=2.5)",
    "AllReduce(compressor='PowerSGDCompressor(rank=2)', sparse_as_dense=True, bytes_per_pack=1024)",
    "PartitionedAR(compressor='TopKCompressor(ratio=0.5, momentum=0.9)', sparse_as_dense=True)",
    "RandomAxisPartitionAR(seed=3, compressor='Int8Compressor(block=64)', sparse_as_dense=True)",
    "PerVariable(builders={'dense/*': 'PartitionedPS', 'table': 'PS()'}, default='PSLoadBalancing')",
    "my_package.module:MyBuilder(path='a', flag=true)",
)
PORTS = {"AUTODIST_COORDINATOR_PORT": "4000", "AUTODIST_SERVER_PORT": "0"}
ENVIRONMENTS: tuple[Mapping[str, str], ...] = (
    {"AUTODIST_RANK": "2", "AUTODIST_COORDINATOR": "127.0.0.1:4000", "AUTODIST_WORKER_OUTPUT": "5"},
    {"AUTODIST_RESOURCE_SPEC": "spec.yaml", "AUTODIST_STRATEGY": "PS(staleness=2)", "AUTODIST_SEED": "7"},
    {"AUTODIST_LOG_LEVEL": "debug", "AUTODIST_JOIN_TIMEOUT": "9.5", "AUTODIST_HEARTBEAT_TIMEOUT": "7"},
    {"AUTODIST_LOST_WORKERS": "continue", "AUTODIST_EXIT_GRACE": "1", "AUTODIST_LAUNCH": "none", **PORTS},
    {"AUTODIST_RECORDED_RUN": "ops", "AUTODIST_OUTPUT": "all", "AUTODIST_RECORD_STEPS": "3", "AUTODIST_DUMP_DIR": "d"},
)
NAMES = sorted(value for name, value in vars(environment).items() if name.endswith("_VARIABLE"))
COMMANDS = (
    "run --local 2 --cpus 3 train.py --epochs 2",
    "run --spec good.yaml --timeline trace.json --all-output --strategy PS(staleness=2) train.py",
    "verify --workers 3 --steps 2 --tolerance 1e-3 --strategy AllReduce train.py",
    "verify --spec good.yaml train.py --learning-rate 0.1",
    "plan --local 2 --save plan.json train.py",
    "plan --spec good.yaml --strategy PartitionedPS train.py",
    "inspect item.pb",
    "inspect strategy.json",
    "inspect good.yaml",
    "inspect --help",
    "--version",
)
WORDS = ("wrong.yaml", *sorted({word for command in COMMANDS for word in command.split()}))


@cache
def strategies() -> tuple[Strategy, ...]:
    made = [
        build_strategy(resolve_builder(name), ITEM, RESOURCES)
        for name in BUILDERS
        if not name.startswith(("my_package", "FromFile"))
    ]
    shards = tuple(VariableStrategy(f"table/part_{index}", PSSynchronizer("10.0.0.2:CPU:0")) for index in range(2))
    mixed = VariableStrategy("table", AllReduceSynchronizer("RING", group=1), "2,1", shards, (400, 600))
    nodes = (
        VariableStrategy("dense/kernel", AllReduceSynchronizer()),
        VariableStrategy("dense/bias", AllReduceSynchronizer()),
        mixed,
    )
    return (*made, Strategy(nodes, RESOURCES.replica_devices))


@cache
def messages() -> tuple[Message, ...]:
    """All valid values, as messages."""
    return (ITEM.to_proto(), RESOURCES.to_proto(), *(one.to_proto() for one in strategies()))


# -- Kinds of inputs: how one is made, and read -----------------------------------------------------------------------


def changed_file(choose: Random, path: Path, valid: Message, other: Message) -> Path:
    """A file of a valid message, in one of its forms, that was changed; or of a message that holds anything."""
    suffix = choose.choice((".json", ".json", ".pb"))
    path = path.with_suffix(suffix)
    if suffix == ".json":
        plain = wire.to_plain(valid)
        if choose.random() < 0.7:
            content = json.dumps(changed_plain(choose, plain)).encode()
        else:
            content = changed_bytes(choose, json.dumps(plain).encode(), json.dumps(wire.to_plain(other)).encode())
    elif choose.random() < 0.7:
        made = changed_message(choose, valid) if choose.random() < 0.8 else any_message(choose, type(valid))
        content = made.SerializeToString()
    else:
        content = changed_bytes(choose, valid.SerializeToString(), other.SerializeToString())
    path.write_bytes(content)
    return path


def shown(path: Path) -> tuple[str, bytes]:
    return path.suffix, path.read_bytes()[:2_000]


def of_resource_spec(choose: Random, folder: Path) -> Hostile:
    if choose.random() < 0.3:
        path = changed_file(choose, folder / "spec", RESOURCES.to_proto(), strategies()[0].to_proto())
    else:
        path, plain = folder / "spec.yaml", wire.to_plain(RESOURCES.to_proto())
        if choose.random() < 0.5:
            changed = changed_plain(choose, plain)
            try:
                text = yaml.dump(changed, allow_unicode=choose.random() < 0.5, default_flow_style=choose.random() < 0.5)
            except RecursionError:  # PyYAML cannot write what is nested so deep; it is to be read all the same.
                text = "[" * 2_000 + "]" * 2_000
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
        else:
            path.write_bytes(changed_bytes(choose, RESOURCES.to_yaml().encode()))

    def read() -> None:
        spec = load_resource_spec(path)
        str(spec).encode()
        assert parse_resource_spec(spec.to_yaml()) == spec
        for node in spec.nodes:
            spec.ssh_config(node)

    return Hostile(shown(path), read, path.stat().st_size)


def of_strategy(choose: Random, folder: Path) -> Hostile:
    valid, other = choose.choice(strategies()).to_proto(), choose.choice(strategies()).to_proto()
    if choose.random() < 0.9:
        valid.ClearField("id")  # Else what is changed is refused for its hash.
    path = changed_file(choose, folder / "strategy", valid, other)

    def read() -> None:
        strategy = Strategy.load(path)
        str(strategy).encode()
        _ = strategy.consistency, strategy.timeout_seconds, strategy.replaced
        assert Strategy.from_proto(strategy.to_proto()) == strategy
        build_strategy(FromFile(path), ITEM, RESOURCES)

    return Hostile(shown(path), read, path.stat().st_size)


def of_graph_item(choose: Random, folder: Path) -> Hostile:
    path = changed_file(choose, folder / "item", ITEM.to_proto(), strategies()[0].to_proto())
    builder = choose.choice(BUILDERS[:-1])

    def read() -> None:
        item = GraphItem.load(path)
        str(item).encode()
        assert GraphItem.from_proto(item.to_proto()) == item
        build_strategy(resolve_builder(builder), item, RESOURCES)

    return Hostile((*shown(path), builder), read, path.stat().st_size)


def of_any_value(choose: Random, folder: Path) -> Hostile:
    path = changed_file(choose, folder / "value", choose.choice(messages()), choose.choice(messages()))
    return Hostile(shown(path), lambda: str(load_value(path)).encode(), path.stat().st_size)


def of_builder(choose: Random, folder: Path) -> Hostile:
    text = choose.choice(BUILDERS)
    if choose.random() < 0.4:
        name = choose.choice(BUILDERS).partition("(")[0]
        argument = choose.choice(
            ("chunk_size", "staleness", "compressor", "min_shard_bytes", "timeout_seconds", "seed", "path")
        )
        text = f"{name}({argument}={any_scalar(choose)!r})"
    else:
        text = changed_bytes(choose, text.encode(), choose.choice(BUILDERS).encode()).decode("utf-8", "surrogateescape")
    return Hostile(text[:2_000], lambda: build_strategy(resolve_builder(text), ITEM, RESOURCES))


def of_settings(choose: Random, folder: Path) -> Hostile:
    given = dict(choose.choice(ENVIRONMENTS))
    for _ in range(choose.randint(1, 3)):
        name, how = choose.choice(NAMES), choose.random()
        text = str(any_scalar(choose)) if how < 0.6 else choose.choice(choose.choice(ENVIRONMENTS).get(name, "1"))
        if how > 0.8:
            text = changed_bytes(choose, given.get(name, "127.0.0.1:4000").encode("utf-8", "surrogateescape")).decode(
                "utf-8", "surrogateescape"
            )
        given[name] = text.replace("\0", "")  # Of which an environment has none.
    return Hostile({name: text[:200] for name, text in given.items()}, lambda: Settings.from_environment(given))


def of_arguments(choose: Random, folder: Path) -> Hostile:
    words = choose.choice(COMMANDS).split()
    for _ in range(choose.randint(1, 3)):
        topology = choose.randint(0, len(words))
        word = choose.choice((choose.choice(WORDS), choose.choice(WORDS), str(any_scalar(choose))))
        if choose.random() < 0.2:
            word = changed_bytes(choose, choose.choice(WORDS).encode()).decode("utf-8", "surrogateescape")
        words[topology : topology + choose.randint(0, 1)] = [word.replace("\0", "")] * choose.choice((0, 1, 1, 1, 2))
    if choose.random() < 0.3:
        value = choose.choice(messages())
        words = ["inspect", changed_file(choose, folder / "changed", value, value).name]

    def read() -> None:
        result = CliRunner().invoke(cli.main, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code == 0:
            return
        lines = result.stderr.splitlines()
        assert result.exit_code in (1, 2), result.output
        assert [line for line in lines if line.startswith(("Error: ", "Usage: "))], result.output
        assert "Traceback (most recent" not in result.stderr
        raise AutoDistError(lines[-1])

    return Hostile([word[:200] for word in words], read)


def of_told(choose: Random, folder: Path) -> Hostile:
    """The line that a worker is told; in some the spec alone was changed, before it was compressed."""
    if choose.random() < 0.5:
        line = changed_bytes(choose, Told("s3cr3t", "10.0.0.1:4000", RESOURCES).line(), Told("another").line())
    else:
        content = changed_message(choose, RESOURCES.to_proto()).SerializeToString()
        line = b"s3cr3t\t" + base64.b64encode(zlib.compress(content))
    return Hostile(line[:2_000], lambda: Told.parse(line), len(line))


class Refused(AutoDistError):
    """A call that ends with a status."""


class Call:
    """What gRPC gives a service beside the request."""

    def abort(self, code: object, details: str) -> None:
        details.encode()
        raise Refused(details)

    def is_active(self) -> bool:
        return True

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True


class NoTime(threading.Condition):
    """Who waits is told at once that time is up, by a clock of its own; nobody may wait for longer than one can."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None or not timeout <= threading.TIMEOUT_MAX:
            raise OverflowError(f"nobody can wait for {timeout} seconds")
        if timeout == threading.TIMEOUT_MAX:
            raise Refused("nobody else comes")
        self.now += timeout
        return False

    def notify(self, n: int = 1) -> None:
        """Nobody else waits."""


METHODS = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].methods


def of_calls(choose: Random, folder: Path) -> Hostile:
    """Some calls of workers, one after the other, on one coordinator."""
    coordinator, no_time = make_coordinator(), NoTime()
    coordinator._new_waiter, coordinator._clock = lambda: no_time, lambda: no_time.now
    service, calls = _Service(coordinator), []
    for _ in range(choose.randint(1, 6)):
        method = choose.choice(METHODS)
        request: Any = any_message(choose, GetMessageClass(method.input_type))
        if choose.random() < 0.8:
            request.rank = choose.randrange(2)
        if choose.random() < 0.3 and hasattr(request, "key"):
            request.key = choose.choice(("k", "leaving/a"))
        if choose.random() < 0.3 and hasattr(request, "spec"):
            request.spec = "spec"
        content = request.SerializeToString()
        calls.append((method, changed_bytes(choose, content) if choose.random() < 0.3 else content))

    def read() -> None:
        refusals = [refusal for method, content in calls if (refusal := call(service, method, content))]
        if refusals:
            raise refusals[0]

    return Hostile([(method.name, content[:300]) for method, content in calls], read)


def call(service: _Service, method: Any, content: bytes) -> AutoDistError | None:
    answer, context = getattr(service, method.name), Call()
    try:
        request = GetMessageClass(method.input_type).FromString(content)
        answers = list(answer(iter([request]), context)) if method.client_streaming else [answer(request, context)]
        for one in answers:
            one.SerializeToString()
    except (Refused, DecodeError) as refusal:  # gRPC itself refuses what cannot be decoded.
        return AutoDistError(str(refusal))
    return None


def of_graph(choose: Random, folder: Path) -> Hostile:
    from tests.support import hostile_graphs  # Here, since only this needs TensorFlow.

    content = hostile_graphs.changed(choose)
    return Hostile(content, lambda: hostile_graphs.compiled(replace(hostile_graphs.captured(), graph_def=content)))


class Kind(NamedTuple):
    """How inputs of a kind are made, how many of a thousand are of it, and how many times longer one may take."""

    make: Callable[[Random, Path], Hostile]
    share: int
    slowness: float = 1.0


KINDS = {
    "resource spec": Kind(of_resource_spec, 200),
    "strategy": Kind(of_strategy, 180),
    "graph item": Kind(of_graph_item, 150),
    "any value": Kind(of_any_value, 50),
    "strategy builder": Kind(of_builder, 110),
    "settings": Kind(of_settings, 120),
    "told": Kind(of_told, 30),
    "arguments": Kind(of_arguments, 70),
    "calls": Kind(of_calls, 80),
    "graph": Kind(of_graph, 10, 20.0),
}
