"""Arguments of another type are refused before anything is done, by an error of ours that names all three."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import tensorflow as tf
from pydantic import ConfigDict, TypeAdapter

from autodist_py import AutoDist, AutoDistError, GraphItem, ResourceSpec, StepHook, Strategy
from autodist_py.config.resource_spec import load_resource_spec, local_resource_spec, parse_resource_spec
from autodist_py.proto.compressors import HorovodCompressor, Int8Compressor, PowerSGDCompressor, TopKCompressor
from autodist_py.proto.graph_item import Gradient, Input, Output, Statistic, Variable
from autodist_py.proto.resource_spec import NodeSpec, SSHConfig
from autodist_py.proto.strategy import VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from autodist_py.proto.values import load_value
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import resolve_builder
from autodist_py.strategy_builders.from_file import FromFile
from autodist_py.strategy_builders.mixed import Parallax
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from autodist_py.strategy_builders.partitioned import PartitionedAR, PartitionedPS, RandomAxisPartitionAR
from autodist_py.testing import assert_equivalent

NUMBERS: tuple[Any, ...] = (5, 2.5, True, 1j, np.float32(3.0))
NO_PATH: tuple[Any, ...] = (*NUMBERS, b"x", [], ["a"], {}, object(), ())
NO_TEXT: tuple[Any, ...] = (*NUMBERS, b"x", [], {}, object(), Path("x"))
NO_FLAG: tuple[Any, ...] = ("false", "no", 0, 1, 2.0, [], {}, np.int64(1))
NO_NUMBER: tuple[Any, ...] = ("1", 1.5, True, [], {}, b"1", np.float64(2.0), np.bool_(True))
NO_NAMES: tuple[Any, ...] = ("x", b"x", 5, True, [5], ["x", 5], {"x": 5})

HERE = NodeSpec("127.0.0.1")


def of_autodist(call: Callable[[AutoDist, Any], Any]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        with AutoDist() as autodist:
            return call(autodist, value)

    return run


def of_session(call: Callable[[Any, tf.Tensor, Any], Any]) -> Callable[[Any], Any]:
    def run(autodist: AutoDist, value: Any) -> Any:
        with tf.Graph().as_default(), autodist.scope():
            loss = tf.constant(1.0) + 1.0
        with autodist.create_distributed_session() as session:
            return call(session, loss, value)

    return of_autodist(run)


CASES: list[tuple[str, Callable[[Any], Any], tuple[Any, ...]]] = [
    ("resource_spec_file of AutoDist", lambda value: AutoDist(value), NO_PATH),
    ("batch of AutoDist", lambda value: AutoDist(batch=value), NO_TEXT),
    ("loss_reduction of AutoDist", lambda value: AutoDist(loss_reduction=value), NO_TEXT),
    ("fetch_reduction of AutoDist", lambda value: AutoDist(fetch_reduction=value), NO_TEXT),
    ("sum_duplicates of AutoDist", lambda value: AutoDist(sum_duplicates=value), NO_FLAG),
    ("strict of AutoDist", lambda value: AutoDist(strict=value), NO_FLAG),
    ("seed of AutoDist", lambda value: AutoDist(seed=value), NO_NUMBER),
    (
        "hook of AutoDist.add_step_hook",
        of_autodist(lambda autodist, value: autodist.add_step_hook(value)),
        (5, "x", len, StepHook),
    ),
    ("function of AutoDist.function", of_autodist(lambda autodist, value: autodist.function(value)), (5, "x", [])),
    (
        "batched of AutoDist.function",
        of_autodist(lambda autodist, value: autodist.function(len, batched=value)),
        NO_NAMES,
    ),
    (
        "dataset of AutoDist.shard",
        of_autodist(lambda autodist, value: autodist.shard(value)),
        (5, "x", [1], np.ones(3)),
    ),
    (
        "policy of AutoDist.shard",
        of_autodist(lambda autodist, value: autodist.shard(tf.data.Dataset.range(3), value)),
        (5, b"data", []),
    ),
    (
        "step of AutoDist.build_strategy",
        of_autodist(lambda autodist, value: autodist.build_strategy(value)),
        (5, len, "x"),
    ),
    (
        "feed_dict of DistributedSession.run",
        of_session(lambda session, loss, value: session.run(loss, value)),
        (["x"], ("x", 1), 5, "x"),
    ),
    (
        "options of DistributedSession.run",
        of_session(lambda session, loss, value: session.run(loss, options=value)),
        (5, {}, "x"),
    ),
    (
        "feed_list of DistributedSession.make_callable",
        of_session(lambda session, loss, value: session.make_callable(loss, value)),
        (5, {"x": 1}),
    ),
    ("path of load_resource_spec", load_resource_spec, NO_PATH),
    ("text of parse_resource_spec", parse_resource_spec, NO_TEXT),
    ("num_workers of local_resource_spec", local_resource_spec, NO_NUMBER),
    ("cpus_per_worker of local_resource_spec", lambda value: local_resource_spec(2, value), ("1", 1.5, ["1"], b"1")),
    ("address of NodeSpec", NodeSpec, NO_TEXT),
    ("gpus of NodeSpec", lambda value: NodeSpec("a", gpus=value), (5, "0", [0], ("0",), (0.0,), (True,))),
    ("cpus of NodeSpec", lambda value: NodeSpec("a", cpus=value), (5, "0", ("0",), (None,))),
    ("chief of NodeSpec", lambda value: NodeSpec("a", chief=value), NO_FLAG),
    ("ssh_config of NodeSpec", lambda value: NodeSpec("a", ssh_config=value), NO_TEXT),
    ("network_bandwidth of NodeSpec", lambda value: NodeSpec("a", network_bandwidth=value), ("1", True, [], None)),
    ("nodes of ResourceSpec", ResourceSpec, (5, "a", HERE, ("a",), (HERE, 5))),
    ("ssh of ResourceSpec", lambda value: ResourceSpec((HERE,), ssh=value), (5, "a", (("lab", 5),))),
    ("port of SSHConfig", lambda value: SSHConfig(port=value), NO_NUMBER),
    ("username of SSHConfig", SSHConfig, NO_TEXT),
    ("shared_envs of SSHConfig", lambda value: SSHConfig(shared_envs=value), (5, "a", (("A", 5),), ("A",))),
    ("path of FromFile", FromFile, NO_PATH),
    ("path of load_value", load_value, NO_PATH),
    ("path of Strategy.load", Strategy.load, NO_PATH),
    ("path of GraphItem.load", GraphItem.load, NO_PATH),
    ("path of ResourceSpec.load", ResourceSpec.load, NO_PATH),
    ("path of ResourceSpec.save", ResourceSpec((HERE,)).save, NO_PATH),
    ("replicas of assert_equivalent", lambda value: assert_equivalent(len, [], replicas=value), NO_NUMBER),
    ("tolerance of assert_equivalent", lambda value: assert_equivalent(len, [], tolerance=value), ("1", [], True)),
]
"""What is given, the call with a value for it, and values of another type."""


@pytest.mark.parametrize(("what", "call", "values"), CASES, ids=[case[0] for case in CASES])
def test_another_type_is_refused_by_name(what: str, call: Callable[[Any], Any], values: tuple[Any, ...]) -> None:
    for value in values:
        kinds = {type(value).__name__, type(value.item() if isinstance(value, np.generic) else value).__name__}
        with pytest.raises(AutoDistError) as raised:
            call(value)
        pattern = rf"{re.escape(what)} must be .*; got .* \(({'|'.join(kinds)})\)"
        assert re.fullmatch(pattern, str(raised.value)), (value, str(raised.value))
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


ON_EACH = AllReduceSynchronizer()
SOUND: Mapping[Callable[..., Any], Mapping[str, Any]] = {
    VariableStrategy: {"var_name": "w", "synchronizer": ON_EACH},
    Strategy: {"node_config": (VariableStrategy("w", ON_EACH),), "replicas": ("a:CPU:0",)},
    AllReduceSynchronizer: {},
    PSSynchronizer: {"reduction_destination": "a:CPU:0"},
    GraphItem: {"graph_def": b"", "variables": ()},
    Variable: {"name": "w", "dtype": "float32", "shape": (2,)},
    Gradient: {"variable": "w", "tensors": ("g:0",)},
    Input: {"name": "x", "dtype": "float32", "shape": (2,), "batched": True},
    Output: {"tensor": "y:0", "dtype": "float32", "shape": (2,)},
    Statistic: {"tensor": "s:0", "dtype": "float32", "shape": (), "reduction": "sum"},
    NodeSpec: {"address": "a"},
    SSHConfig: {},
    ResourceSpec: {"nodes": (HERE,)},
    PS: {},
    PSLoadBalancing: {},
    PartitionedPS: {},
    AllReduce: {},
    PartitionedAR: {},
    RandomAxisPartitionAR: {},
    Parallax: {},
    HorovodCompressor: {},
    PowerSGDCompressor: {},
    TopKCompressor: {},
    Int8Compressor: {},
}
"""Values of ours, and builders, with arguments that they take."""

ANY_TYPE: tuple[Any, ...] = (
    *(5, -1, 2.5, float("nan"), True, 1j, "x", "", "false", b"x", None, [], ["a"], [5], {}, {"a": 1}, (), (5,), ("a",)),
    *(
        object(),
        int,
        len,
        np.float32(3),
        np.bool_(True),
        np.ones(2),
        Path("x"),
        tf.constant(1),
        range(3),
        {1},
        iter([1]),
    ),
)


@pytest.mark.parametrize("kind", SOUND, ids=lambda kind: kind.__name__)
def test_each_field_is_of_its_type_or_refused_by_name(kind: Any) -> None:
    sound, hints = SOUND[kind], get_type_hints(kind)
    kind(**sound)
    for field in (one for one in fields(kind) if one.init):
        is_of_type = TypeAdapter(hints[field.name], config=ConfigDict(strict=True, arbitrary_types_allowed=True))
        for value in ANY_TYPE:
            try:
                made = kind(**{**sound, field.name: value})
            except AutoDistError as refusal:
                assert "\n" not in str(refusal) and len(str(refusal)) < 400
                assert field.name in str(refusal) or value in ("", "x", "false", (), ("a",), 5, -1, (5,)), str(refusal)
            else:
                is_of_type.validate_python(getattr(made, field.name))


class Unwritable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "value", [1 << 20_000, [1 << 20_000], (-1 << 20_000,), Unwritable()], ids=["n", "list", "tuple", "own"]
)
@pytest.mark.parametrize("call", [AutoDist, load_resource_spec, NodeSpec, resolve_builder, Strategy.load])
def test_what_python_does_not_write_out_is_refused_in_our_words(call: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(AutoDistError, match=r"got a value that cannot be written out: (ValueError|RuntimeError)"):
        call(value)


@pytest.mark.parametrize("number", [1 << 20_000, -1 << 20_000], ids=["positive", "negative"])
def test_a_number_that_python_does_not_write_out_is_refused_in_our_words(number: int) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: AutoDist(seed=number),
        lambda: NodeSpec("a", cpus=(0, number)),
        lambda: NodeSpec("a", network_bandwidth=number),
        lambda: SSHConfig(port=number),
        lambda: local_resource_spec(number),
        lambda: local_resource_spec(1, number),
        lambda: PS(staleness=-abs(number)),
        lambda: PS(replicas_to_aggregate=-abs(number)),
        lambda: AllReduce(chunk_size=-abs(number)),
        lambda: AllReduce(timeout_seconds=number),
        lambda: AllReduce(bytes_per_pack=number),
        lambda: AllReduce(compressor=number),  # type: ignore[arg-type]
        lambda: RandomAxisPartitionAR(seed=number),
        lambda: TopKCompressor(momentum=number),
        lambda: PowerSGDCompressor(rank=-abs(number)),
    )
    for call in calls:
        with pytest.raises(AutoDistError) as raised:
            call()
        assert len(str(raised.value)) < 300


def test_what_stands_for_the_type_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "resources.yaml"
    file.write_text("nodes: [{address: 127.0.0.1}]")
    of_numpy: dict[str, Any] = {"seed": np.int64(3), "strict": np.bool_(False)}
    nodes: Any = [HERE]
    taken: tuple[Any, ...] = (["x"], ("x",), {"x"}, frozenset("x"), {"x": 0}.keys(), None)
    for path in (file, str(file), None, ResourceSpec((HERE,)), ResourceSpec(nodes)):
        with AutoDist(path, **of_numpy) as autodist:
            for names in taken:
                autodist.function(lambda x: x, batched=names)
    assert NodeSpec("a", network_bandwidth=10).network_bandwidth == 10
    cpus: Any = tuple(np.arange(2))
    assert [type(index) for index in NodeSpec("a", cpus=cpus).cpus] == [int, int]
