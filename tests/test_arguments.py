"""Arguments of another type are refused before anything is done, by an error of ours that names all three."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist, AutoDistError, GraphItem, ResourceSpec, Strategy
from autodist_py.proto.resource_spec import NodeSpec, SSHConfig
from autodist_py.proto.values import load_value
from autodist_py.resources import load_resource_spec, local_resource_spec, parse_resource_spec
from autodist_py.strategy_builders.from_file import FromFile
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
