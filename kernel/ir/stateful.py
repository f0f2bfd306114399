"""Stateful op types that the replicas of a step may run, by what is known of their state.

TensorFlow calls an op type stateful where a run does something, or where two runs on equal inputs may differ. What no
table here names may hold state that each replica would have for itself, whoever registered it.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

import tensorflow as tf

from autodist_py.kernel.ir.functions import with_called
from autodist_py.kernel.ir.graph import (
    ITERATOR_NEXT,
    READS_VARIABLE,
    SEEDED_RANDOM,
    SHARED_BY_NAME,
    SHOWS,
    TABLES,
    TAKES_ELEMENTS,
    VARIABLE_OP,
    WRITES_RESOURCE,
    GraphView,
)
from autodist_py.kernel.ir.tf_adapter import is_stateful

NodeDef: TypeAlias = tf.compat.v1.NodeDef

_RULES = (
    "AdaMax",
    "Adadelta",
    "Adagrad",
    "AdagradDA",
    "AdagradV2",
    "Adam",
    "AdamWithAmsgrad",
    "AddSign",
    "CenteredRMSProp",
    "Ftrl",
    "FtrlV2",
    "GradientDescent",
    "KerasMomentum",
    "Momentum",
    "PowerSign",
    "ProximalAdagrad",
    "ProximalGradientDescent",
    "RMSProp",
)
_DENSE_ALONE = frozenset({"AdaMax", "Adam", "AdamWithAmsgrad", "AddSign", "GradientDescent", "PowerSign"})

DENSE_UPDATES = frozenset(f"ResourceApply{rule}" for rule in _RULES)
"""Op types that update a variable by a dense gradient, each by another rule."""
SPARSE_UPDATES = frozenset(f"ResourceSparseApply{rule}" for rule in _RULES if rule not in _DENSE_ALONE)
"""Likewise by a sparse one."""

_OF_VARIABLES = (
    READS_VARIABLE
    | DENSE_UPDATES
    | SPARSE_UPDATES
    | {f"ResourceScatter{change}" for change in ("Add", "Div", "Max", "Min", "Mul", "Sub", "Update")}
    | {f"ResourceScatterNd{change}" for change in ("Add", "Max", "Min", "Sub", "Update")}
    | {
        VARIABLE_OP,
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "AssignVariableOp",
        "ResourceCountUpTo",
        "ResourceStridedSliceAssign",
        "RngReadAndSkip",
        "RngSkip",
        "StatefulRandomBinomial",
        "StatefulStandardNormal",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatefulUniform",
        "StatefulUniformFullInt",
        "StatefulUniformInt",
    }
)

_OF_TENSOR_ARRAYS = frozenset(
    {
        "TensorArrayCloseV3",
        "TensorArrayConcatV3",
        "TensorArrayGatherV3",
        "TensorArrayGradV3",
        "TensorArrayGradWithShape",
        "TensorArrayReadV3",
        "TensorArrayScatterV3",
        "TensorArraySizeV3",
        "TensorArraySplitV3",
        "TensorArrayV3",
        "TensorArrayWriteV3",
    }
)

_OF_DATA = frozenset(
    {
        "CSVDataset",
        "CSVDatasetV2",
        "DatasetToSingleElement",
        "FixedLengthRecordDataset",
        "FixedLengthRecordDatasetV2",
        "GroupByReducerDataset",
        "ListDataset",
        "MatchingFilesDataset",
        "RangeDataset",
        "ReduceDataset",
        "SparseTensorSliceDataset",
        "TFRecordDataset",
        "TFRecordDatasetV2",
        "TensorDataset",
        "TensorSliceDataset",
        "TextLineDataset",
    }
)

_OF_FILES = frozenset(
    {
        "LoadAndRemapMatrix",
        "MergeV2Checkpoints",
        "Restore",
        "RestoreSlice",
        "RestoreV2",
        "Save",
        "SaveSlices",
        "SaveV2",
        "WriteFile",
    }
)

_OF_SUMMARIES = frozenset({"CreateSummaryDbWriter", "CreateSummaryFileWriter", "FlushSummaryWriter", "SummaryWriter"})

_KEEPS_NOTHING = frozenset(
    {
        "Assert",
        "CheckNumerics",
        "CheckNumericsV2",
        "CudnnRNN",
        "CudnnRNNBackprop",
        "CudnnRNNBackpropV2",
        "CudnnRNNBackpropV3",
        "CudnnRNNV2",
        "CudnnRNNV3",
        "DebugIdentityV2",
        "DebugIdentityV3",
        "DeepCopy",
        "DeviceIndex",
        "Empty",
        "GraphDefVersion",
        "GuaranteeConst",
        "IsTensorFloat32Enabled",
        "Print",
        "StatelessRandomGetAlg",
        "Timestamp",
        "XlaCallModule",
    }
)

STATE_OF_REPLICAS: Mapping[str, frozenset[str]] = {
    "it is a variable's, and passes keep the copies of a variable equal": _OF_VARIABLES,
    "random numbers and Python code, which are known to differ": SEEDED_RANDOM | {"EagerPyFunc", "PyFunc"},
    "functions, of which each op is looked at": frozenset({"Case", "If", "StatefulPartitionedCall", "While"}),
    "a table or queue is read, or given what is equal on all replicas": (WRITES_RESOURCE - TABLES)
    | {"LookupTableExportV2", "LookupTableFindV2", "LookupTableSizeV2"}
    | {"QueueCloseV2", "QueueIsClosedV2", "QueueSizeV2"},
    "it is shown to the user, by one replica": SHOWS,
    "a summary writer": _OF_SUMMARIES,
    "elements of one step, made of what an op reads, or of files": _OF_DATA,
    "lists of one step": _OF_TENSOR_ARRAYS,
    "it is in files": _OF_FILES,
    "there is none, only something that is said, checked, or looked up": _KEEPS_NOTHING,
}
"""Stateful op types that each replica may run, in a graph or in a function that it calls, by why."""

_STACKS = frozenset({"StackCloseV2", "StackPopV2", "StackPushV2", "StackV2"})

STATE_OF_A_GRAPH: Mapping[str, frozenset[str]] = {
    "it stands once on a worker": ITERATOR_NEXT | TABLES,
    "each replica has the whole queue or, where there are several, nothing is taken out": (
        SHARED_BY_NAME | TAKES_ELEMENTS
    ),
    "values of a loop of TensorFlow 1, for its gradient": _STACKS,
}
"""Those that are known only where they stand in the graph itself, by why: nobody looks for them in functions."""

_KNOWN = frozenset[str]().union(*STATE_OF_REPLICAS.values())
_KNOWN_IN_A_GRAPH = _KNOWN.union(*STATE_OF_A_GRAPH.values())


def may_hold_state(node: NodeDef, *, in_function: bool) -> bool:
    """Whether `node`, which does not stand once on a worker, may hold state that each replica would have for itself."""
    return node.op not in (_KNOWN if in_function else _KNOWN_IN_A_GRAPH) and is_stateful(node)


def holding_state(view: GraphView, ops: Collection[str]) -> Iterator[tuple[NodeDef, NodeDef]]:
    """Each of the `ops` that may hold state which replicas would have for themselves, or runs such; with what holds it.

    None of `ops` stands once on a worker. Back-propagation through loops of TensorFlow 1 puts values on stacks, which
    the graph's indices follow where it has a loop.
    """
    has_loops = bool(view.control_flow.frames)
    for name in ops:
        node = view.nodes[name]
        for one in with_called(node, view.library):
            is_stray = one.op in _STACKS and not has_loops
            if one.op not in view.library and (is_stray or may_hold_state(one, in_function=one is not node)):
                yield node, one
