"""Files of values: whole or not at all, told apart, and readable without TensorFlow."""

import json
import os
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from autodist_py.proto import graphitem_pb2 as pb
from autodist_py.proto import wire
from autodist_py.proto.errors import AutoDistError, GraphItemError
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Output, Variable
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from autodist_py.proto.values import load_value

ROOT = Path(__file__).resolve().parents[2]

ITEM = GraphItem(
    graph_def=b"\x00\xff",
    variables=tuple(Variable(f"v{index}", "float32", (index,)) for index in range(9)),
    gradients=tuple(Gradient(f"v{index}", (f"g{index}:0",)) for index in reversed(range(9))),
    inputs=(Input("x", "float32", (None, 0), batched=True),),
    outputs=(Output("y:0", "float32", None),),
)
VALUES = [
    ITEM,
    GraphItem(b"", ()),
    Strategy((VariableStrategy("w", AllReduceSynchronizer()),), ("127.0.0.1:CPU:0",)),
    Strategy((), ("127.0.0.1:CPU:0",)),
    ResourceSpec((NodeSpec("127.0.0.1"),)),
    ResourceSpec((NodeSpec("127.0.0.1", network_bandwidth=2.0), NodeSpec("127.0.0.2", chief=True))),
]


@pytest.mark.parametrize("suffix", [".pb", ".json"])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_file_tells_which_value_it_holds(tmp_path, value, suffix):
    path = tmp_path / f"value{suffix}"
    value.save(path)
    loaded = load_value(path)
    assert type(loaded) is type(value)
    assert str(loaded) == str(value)


def test_a_file_of_something_else_is_refused_with_a_reason_for_each_kind(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"colour": "red"}')
    with pytest.raises(AutoDistError) as refusal:
        load_value(path)
    assert [line.split(":")[0].strip() for line in str(refusal.value).splitlines()[1:]] == [
        "not a graph item",
        "not a strategy",
        "not a resource spec",
    ]


@pytest.mark.parametrize("suffix", [".pb", ".json"])
def test_a_small_file_takes_little_memory(tmp_path, suffix):
    path = tmp_path / f"item{suffix}"
    ITEM.save(path)
    tracemalloc.start()
    try:
        GraphItem.load(path)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_what_cannot_be_a_files_name_is_refused(tmp_path, name):
    with pytest.raises(GraphItemError, match="is no name of a file"):
        GraphItem.load(tmp_path / f"{name}.pb")
    with pytest.raises(GraphItemError, match="is no name of a file"):
        ITEM.save(tmp_path / f"{name}.pb")


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(GraphItemError, match=r"binary \(.pb\) or JSON \(.json\)"):
        ITEM.save(tmp_path / "item.txt")
    with pytest.raises(AutoDistError, match=r"binary \(.pb\) or JSON \(.json\)"):
        load_value(tmp_path / "item.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a GraphItem in .json form"),
        ("[]", "the file: expected dict"),
        ('{"graph_deff": {}}', r"graph_deff: no such field; did you mean 'graph_def'\?"),
        ('{"graph_def": 3}', "graph_def: expected dict, got 3"),
        ('{"graph_def": {"value": "?"}}', "not a GraphItem in .json form"),
        ('{"run_ops": ["a", 1]}', r"run_ops\[1\]: expected str, got 1"),
        ('{"variables": [{"trainable": 1}]}', r"variables\[0\].trainable: expected bool, got 1"),
        ('{"grad_target_pairs": {"g:0": 1}}', r"grad_target_pairs\['g:0'\]: expected str, got 1"),
    ],
)
def test_damaged_json_is_refused_by_the_place_of_the_damage(tmp_path, text, message):
    path = tmp_path / "item.json"
    path.write_text(text)
    with pytest.raises(GraphItemError, match=message):
        GraphItem.load(path)


def test_damaged_binary_is_refused(tmp_path):
    path = tmp_path / "item.pb"
    path.write_bytes(wire.to_bytes(ITEM.to_proto())[:-1])
    with pytest.raises(GraphItemError, match=r"not a GraphItem in \.pb form"):
        GraphItem.load(path)


def test_json_names_fields_as_the_proto_does():
    content = json.loads(wire.to_json(ITEM.to_proto()))
    assert content["graph_def"] == {"type_url": "type.googleapis.com/tensorflow.GraphDef", "value": "AP8="}
    assert content["inputs"][0]["shape"] == {"dimensions": [{}, {"size": 0}]}
    assert wire.from_json(pb.GraphItem, json.dumps(content)) == ITEM.to_proto()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "item.pb"
    path.write_bytes(b"old")

    def full_disk(self, target):
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(GraphItemError, match=r"item\.pb: \d+ bytes cannot be written: no space left"):
        ITEM.save(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["item.pb"]


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path):
    ITEM.save(tmp_path / "item.pb")
    (tmp_path / "plain").touch()
    assert stat.S_IMODE((tmp_path / "item.pb").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def in_new_process(code, **environment):
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return run.stdout


def test_bytes_do_not_depend_on_the_hash_seed():
    code = """
import hashlib
from autodist_py.proto import wire
from autodist_py.proto.graph_item import GraphItem, Gradient, Variable
from autodist_py.config.resource_spec import parse_resource_spec
names = [f"v{index}" for index in range(50)]
item = GraphItem(
    graph_def=b"graph",
    variables=tuple(Variable(name, "float32", (2,)) for name in names),
    gradients=tuple(Gradient(name, (f"{name}/g:0",)) for name in names),
)
envs = ", ".join(f"E{index}: x" for index in range(20))
spec = parse_resource_spec(f"{{nodes: [{{address: h}}], ssh: {{a: {{shared_envs: {{{envs}}}}}, b: {{}}, c: {{}}}}}}")
for value in (item, spec):
    print(value.fingerprint, hashlib.sha256(wire.to_json(value.to_proto()).encode()).hexdigest())
"""
    outputs = {in_new_process(code, PYTHONHASHSEED=seed) for seed in ("0", "1", "2")}
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 4


def test_values_and_builders_load_without_tensorflow():
    code = """
import importlib, pkgutil, sys
import autodist_py.proto, autodist_py.strategy_builders, autodist_py.config.resource_spec
from autodist_py.strategy_builders.base import resolve_builder
for package in (autodist_py.proto, autodist_py.strategy_builders):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not module.name.endswith("_grpc"):
            importlib.import_module(module.name)
resolve_builder("AllReduce")
print(sorted(name for name in sys.modules if name.split(".")[0] in ("tensorflow", "keras")))
"""
    assert in_new_process(code).strip() == "[]"


def test_the_generated_code_is_up_to_date():
    check = subprocess.run(
        [sys.executable, "tools/generate_proto.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (check.returncode, check.stderr) == (0, "")
