"""A branch that replicas take together writes a variable alike, where what differs between them does not reach it."""

from collections.abc import Callable

import pytest
import tensorflow as tf

from autodist_py.kernel.ir.branch_writes import writes_alike
from autodist_py.kernel.ir.dataflow import calling
from autodist_py.kernel.ir.graph import GraphView

Taken = Callable[[tf.Variable, tf.Variable, tf.Tensor, tf.Tensor], object]
"""Of the variable that is asked for, another one, a value that is the same everywhere, and one of each replica."""

DRAWS = frozenset({"RandomUniform"})
ALIKE: dict[str, Taken] = {
    "another is written with what differs": lambda v, other, same, own: (v.assign_add(same), other.assign_add(own)),
    "what differs is returned": lambda v, other, same, own: (v.assign(same * v), own * 2.0)[1],
    "another is drawn": lambda v, other, same, own: (v.assign_add(same), other.assign(tf.random.uniform([]))),
}
DIFFERING: dict[str, Taken] = {
    "what differs": lambda v, other, same, own: v.assign_add(same * own),
    "another that differs": lambda v, other, same, own: v.assign_add(other),
    "what is drawn": lambda v, other, same, own: v.assign_add(tf.random.uniform([])),
    "what is drawn in a call": lambda v, other, same, own: v.assign_add(tf.function(tf.random.uniform)([])),
    "a branch within": lambda v, other, same, own: tf.cond(own > 0.0, lambda: v.assign_add(same), lambda: v.value()),
    "a branch within, alike": lambda v, other, same, own: tf.cond(
        same > 0.0, lambda: v.assign_add(same), lambda: v.value()
    ),
}


def asked(taken: Taken, *, differing_condition: bool = False) -> bool:
    v, other = tf.Variable(1.0), tf.Variable(2.0)

    @tf.function(autograph=False)
    def step(same: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
        condition = (own if differing_condition else same) > 0.0

        def then() -> tf.Tensor:
            taken(v, other, same, own)
            return same

        return tf.cond(condition, then, lambda: same)

    concrete = step.get_concrete_function(tf.TensorSpec([]), tf.TensorSpec([]))
    handles = {id(outer): inner.op.name for outer, inner in concrete.graph.captures}
    view = GraphView(concrete.graph.as_graph_def())
    own = {"own", handles.get(id(other.handle), "own")}
    varying = view.dataflow_descendants(own)
    (branch,) = (node.name for node in view.of_type({"If", "StatelessIf"}))
    return writes_alike(view, branch, handles[id(v.handle)], varying, DRAWS, calling(view, DRAWS))


@pytest.mark.parametrize("taken", ALIKE.values(), ids=ALIKE.keys())
def test_what_differs_does_not_reach_the_variable(taken: Taken) -> None:
    assert asked(taken)
    assert not asked(taken, differing_condition=True)


@pytest.mark.parametrize("taken", DIFFERING.values(), ids=DIFFERING.keys())
def test_what_differs_may_reach_the_variable(taken: Taken) -> None:
    assert not asked(taken)
