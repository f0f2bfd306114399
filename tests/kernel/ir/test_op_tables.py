"""Tables of op types against TensorFlow's registry, of which every op is looked at."""

from collections import Counter
from collections.abc import Iterable

import pytest
import tensorflow as tf
from tensorflow.core.framework.op_def_pb2 import OpDef, OpList
from tensorflow.python.client import pywrap_tf_session as c_api

from autodist_py.kernel.analysis.batch_layout.back_propagation import BACK_PROPAGATION
from autodist_py.kernel.analysis.batch_layout.rules import is_known
from autodist_py.kernel.ir import graph
from autodist_py.kernel.ir.dataflow import PYTHON_OPS
from autodist_py.kernel.ir.graph import READS_VARIABLE, SEED_INPUT, SEEDED_RANDOM
from autodist_py.kernel.ir.stateful import STATE_OF_A_GRAPH, STATE_OF_REPLICAS, may_hold_state

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

HOLDS_STATE = (
    {"AddManySparseToTensorsMap", "Barrier", "MutexLock", "MutexV2", "NonDeterministicInts", "RecordInput"}
    | {"ConditionalAccumulator", "ResourceConditionalAccumulator", "SparseConditionalAccumulator"}
    | {"ResourceAccumulatorApplyGradient", "ResourceAccumulatorTakeGradient"}
    | {"MapStage", "MapUnstage", "OrderedMapStage", "Stage", "StageClear", "StagePeek", "StageSize"}
    | {"IdentityReaderV2", "ReaderReadUpToV2", "ReaderReadV2", "TFRecordReaderV2", "TextLineReader"}
    | {"IteratorGetNextAsOptional", "MakeIterator", "MultiDeviceIteratorGetNextFromShard", "ShuffleDatasetV3"}
    | {"FIFOQueue", "HashTable", "Stack", "TemporaryVariable", "Variable", "VariableV2"}
    | {"CollectiveReduceV2", "RemoteCall", "TPUExecute", "XlaLaunch"}
)
"""Some of the op types that replicas must not run."""


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


def test_a_stateful_op_type_is_in_one_table_or_refused(registry: dict[str, OpDef]) -> None:
    known = Counter(
        name for table in (STATE_OF_REPLICAS, STATE_OF_A_GRAPH) for named in table.values() for name in named
    )
    assert known.keys() <= registry.keys()
    assert {name for name, times in known.items() if times > 1} == set()
    refused = {name for name in registry if may_hold_state(tf.compat.v1.NodeDef(op=name), in_function=False)}
    assert {name for name, one in registry.items() if one.is_stateful} == refused | stateful(known, registry)
    assert refused.isdisjoint(known)
    assert refused >= HOLDS_STATE


def test_in_a_function_fewer_stateful_op_types_are_known(registry: dict[str, OpDef]) -> None:
    in_graph, in_function = (
        {name for name in registry if may_hold_state(tf.compat.v1.NodeDef(op=name), in_function=where)}
        for where in (False, True)
    )
    assert in_function - in_graph == stateful(frozenset().union(*STATE_OF_A_GRAPH.values()), registry)


def stateful(names: Iterable[str], registry: dict[str, OpDef]) -> set[str]:
    return {name for name in names if registry[name].is_stateful}


def test_an_op_type_that_nobody_has_registered_may_hold_state() -> None:
    assert may_hold_state(tf.compat.v1.NodeDef(op="OfAnUnknownLibrary"), in_function=False)


def test_what_a_table_of_the_analysis_names_may_run_on_replicas(registry: dict[str, OpDef]) -> None:
    """The analysis has a rule for it, so that a refusal would be in vain."""
    analysed = DRAWN | graph.SHOWS | graph.STANDS_ONCE | graph.WRITES_RESOURCE | READS_VARIABLE | PYTHON_OPS
    assert not {name for name in analysed if may_hold_state(tf.compat.v1.NodeDef(op=name), in_function=False)}
