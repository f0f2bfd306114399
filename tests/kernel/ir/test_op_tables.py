"""Tables of op types against TensorFlow's registry, of which every op is looked at."""

import pytest
from tensorflow.core.framework.op_def_pb2 import OpDef, OpList
from tensorflow.python.client import pywrap_tf_session as c_api

from autodist_py.kernel.analysis.batch_layout.back_propagation import BACK_PROPAGATION
from autodist_py.kernel.analysis.batch_layout.rules import is_known
from autodist_py.kernel.ir import graph
from autodist_py.kernel.ir.dataflow import PYTHON_OPS
from autodist_py.kernel.ir.graph import READS_VARIABLE, SEED_INPUT, SEEDED_RANDOM

DRAWN = SEEDED_RANDOM | SEED_INPUT.keys()
NO_STREAM = {
    "ComputeAccidentalHits": "it has no numbers, only those of a sampler",
    "RandomShuffleQueue": "a queue: it stands once, and steps that take elements are refused",
    "RandomShuffleQueueV2": "likewise",
    "RiscRandomUniform": "has no kernel",
    "SnapshotDataset": "a data set",
    **dict.fromkeys(
        ("CudnnRNN", "CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3", "CudnnRNNV2", "CudnnRNNV3"),
        "a GPU's recurrent layer, which draws only for a dropout that Keras does not ask of it",
    ),
    **dict.fromkeys(
        (
            "CudnnRNNCanonicalToParams",
            "CudnnRNNCanonicalToParamsV2",
            "CudnnRNNParamsSize",
            "CudnnRNNParamsToCanonical",
            "CudnnRNNParamsToCanonicalV2",
        ),
        "sorts weights of such a layer",
    ),
}
"""Op types with a seed that have no stream of random numbers in a step, and why."""

STATE_ALLOWED = READS_VARIABLE | DRAWN | {"CheckNumerics", "LookupTableFindV2"}
"""Op types with a rule that TensorFlow calls stateful: what they read is the same on all replicas, or they draw."""


@pytest.fixture(scope="module")
def registry() -> dict[str, OpDef]:
    found = OpList.FromString(c_api.TF_GetBuffer(c_api.TF_GetAllOpList()))
    return {one.name: one for one in found.op}


def test_every_op_type_of_a_table_exists(registry: dict[str, OpDef]) -> None:
    tables = [value for name, value in vars(graph).items() if name.isupper() and isinstance(value, frozenset | dict)]
    named = {name for table in (*tables, PYTHON_OPS) for name in table}
    assert len(tables) > 10
    assert named - registry.keys() <= {"HorovodAllreduce"}


def test_every_op_type_with_a_stream_is_known_to_draw(registry: dict[str, OpDef]) -> None:
    seeded = {name for name, one in registry.items() if {"seed", "seed2"} & {attribute.name for attribute in one.attr}}
    assert seeded - DRAWN == NO_STREAM.keys()


def test_the_seed_of_a_stateless_draw_is_where_it_is_said_to_be(registry: dict[str, OpDef]) -> None:
    for name, position in SEED_INPUT.items():
        assert registry[name].input_arg[position].name in ("seed", "key"), name
        assert not registry[name].is_stateful


def test_an_op_type_with_a_rule_keeps_nothing(registry: dict[str, OpDef]) -> None:
    """What it returns is made of what it reads: else replicas would have something of their own."""
    ruled = [name for name in registry if is_known(name) or name in BACK_PROPAGATION]
    assert len(ruled) > 240
    assert {name for name in ruled if registry[name].is_stateful} <= STATE_ALLOWED
