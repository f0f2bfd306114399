"""Whether a gradient is coded on its way, by whatever it is synchronized."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import tensorflow as tf

from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.kernel.compressors.codec import Dense, Slot
from autodist_py.kernel.compressors.coding import compressor_for
from autodist_py.kernel.pipeline import start
from autodist_py.kernel.program import Options
from autodist_py.proto.compressors import HorovodCompressor
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Variable
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer, Synchronizer
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import build_strategy
from examples.plugin.brief import Brief
from tests.support import kernel_programs


def item() -> GraphItem:
    """Gradients of the examples, of nothing, and of no example."""
    with tf.Graph().as_default() as graph:
        x = kernel_programs.placeholder("x", None, 3)
        mean = tf.reduce_mean(x, axis=0)
        gradients = {"of_examples": mean, "of_nothing": mean[:0], "of_no_example": tf.ones([3], tf.float64)}
        for name, gradient in gradients.items():
            update = tf.raw_ops.AssignSubVariableOp
            update(
                resource=kernel_programs.handle(name, *gradient.shape),
                value=tf.identity(gradient, name=f"gradient/{name}"),
            )
        return kernel_programs.captured(
            graph,
            variables=[Variable(name, "float64", tuple(one.shape)) for name, one in gradients.items()],
            gradients=[Gradient(name, (f"gradient/{name}:0",)) for name in gradients],
            inputs=[Input("x", "float64", (None, 3), batched=True)],
        )


CODED = "HorovodCompressor"
ROOT = Path(__file__).resolve().parents[3]
DEVICE = "127.0.0.1:CPU:0"


@pytest.mark.parametrize(
    ("replicas", "synchronizer", "coded"),
    [
        ((1, 1), AllReduceSynchronizer(compressor=CODED), {"of_examples"}),
        ((1, 1), PSSynchronizer(DEVICE, compressor=CODED), {"of_examples"}),
        ((1, 1), AllReduceSynchronizer(), set()),
        ((2,), AllReduceSynchronizer(compressor=CODED), set()),
        ((2,), PSSynchronizer(DEVICE, compressor=CODED), set()),
    ],
)
def test_what_differs_and_travels_is_coded(
    replicas: tuple[int, ...], synchronizer: Synchronizer, coded: set[str]
) -> None:
    nodes = tuple(VariableStrategy(variable.name, synchronizer) for variable in item().trainable_variables)
    program = start(item(), Strategy(nodes, (DEVICE,)), kernel_programs.topology(*replicas), Options())

    found = {gradient.variable: compressor_for(program, gradient) for gradient in program.item.gradients}

    assert {name for name, compressor in found.items() if compressor is not None} == coded
    assert all(found[name] == HorovodCompressor() for name in coded)


class SaysLess(Brief):
    """It sends bfloat16."""

    def travels_as(self, dtype: str) -> str:
        return dtype

    def compress(self, gradients, states, wire):
        return tf.cast(Brief.compress(self, gradients, states, wire)[0], tf.bfloat16), list(states)


class KeepsSome(Brief):
    """It keeps what it says that it does not."""

    def init(self, gradients: Sequence[Dense]) -> list[dict[str, Slot]]:
        return [{"error": Slot(one.shape, one.dtype)} for one in gradients]


class KeepsTuples(Brief):
    """It gives something else than dicts of slots."""

    def init(self, gradients: Sequence[Dense]) -> list[Any]:
        return [() for _ in gradients]


class Whole(Brief):
    """It names a type to which nothing is rounded."""

    def travels_as(self, dtype: str) -> str:
        return "int8"


@dataclass(frozen=True)
class Lossy(Brief):
    """It codes no rows."""

    codes_rows: ClassVar[bool] = False


@pytest.mark.parametrize("synchronizer", [AllReduceSynchronizer, lambda **given: PSSynchronizer(DEVICE, **given)])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "SaysLess",
            "says that numbers of float64 travel as float64, and sends bfloat16 for .* variable 'of_examples'",
        ),
        ("KeepsSome", r"says keeps_state = False, and keeps \['error'\] of the gradient of variable 'of_examples'"),
        ("KeepsTuples", r"returns a dict of slots by name for each gradient, .*; of [12] gradients got \[\(\)"),
        ("Whole", "says that numbers of float64 travel as 'int8'; numbers travel as they are, or as float16, bfloat16"),
    ],
)
def test_what_a_plug_in_says_of_itself_is_checked(synchronizer, name, message):
    one = synchronizer(compressor=f"{__name__}:{name}")
    nodes = tuple(VariableStrategy(variable.name, one) for variable in item().trainable_variables)
    with pytest.raises(StrategyError, match=f"{name} {message}"):
        kernel_programs.after(
            "lower-exchanges",
            item(),
            replace(kernel_programs.topology(1, 1), servers={DEVICE: 0}),
            Strategy(nodes, (DEVICE,)),
        )


def test_rows_go_with_plug_ins_that_say_so() -> None:
    table = GraphItem(b"", (Variable("table", "float32", (4, 2)),), (Gradient("table", ("i:0", "v:0", "s:0")),))
    resources = local_resource_spec(2)
    build_strategy(AllReduce(compressor=f"{__name__}:Brief"), table, resources)
    with pytest.raises(StrategyError, match="'table' has a sparse gradient, which Lossy cannot compress"):
        build_strategy(AllReduce(compressor=f"{__name__}:Lossy"), table, resources)


def test_the_compressor_of_the_manual_is_one_that_can_be_used():
    manual = (ROOT / "docs" / "writing-a-compressor.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", manual, re.DOTALL)
    module = ModuleType("of_the_manual")
    sys.modules[module.__name__] = module  # Where dataclasses look for it.
    try:
        exec(code, vars(module))
        one = AllReduceSynchronizer(compressor=module.Brief())
        nodes = tuple(VariableStrategy(variable.name, one) for variable in item().trainable_variables)
        where = kernel_programs.topology(1, 1)
        program = kernel_programs.after("lower-collectives", item(), where, Strategy(nodes, (DEVICE,)))
    finally:
        del sys.modules[module.__name__]
    sent = {
        tf.as_dtype(program.graph.nodes[op].attr["T"].type) for one in program.lowered.collectives for op in one.ops
    }
    assert tf.bfloat16 in sent
