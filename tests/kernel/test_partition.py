"""Partition: a step whose variables are cut computes, on one device, what the step computes."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist_py.kernel.device import Place
from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.passes.partition import Partition
from autodist_py.kernel.pipeline import compile, start
from autodist_py.kernel.program import Options, Program
from autodist_py.kernel.verify import verify
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Variable
from autodist_py.proto.strategy import Node, Strategy, shard_name
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from autodist_py.runtime.executor import Executor
from tests.capture.steps import capture
from tests.kernel import programs
from tests.oracle_programs import FUNCTION_FAMILIES, batches

DEVICE = "127.0.0.1:CPU:0"
SERVED, REDUCED = PSSynchronizer(DEVICE), AllReduceSynchronizer()
TWO_WORKERS = programs.place(1, 1)
raw = tf.raw_ops


@pytest.fixture(autouse=True)
def floatx() -> Iterator[None]:
    """Keras's programs are of float64 here, and what others make is as it was before."""
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # A layer that was made before has settled it.
    yield
    keras.config.set_dtype_policy(policy)
    keras.config.set_floatx(before)


class Cutting(NamedTuple):
    """Along which axis a variable is cut, and the shards' sizes."""

    axis: int
    sizes: Sequence[int]


def node_of(item: GraphItem, name: str, cutting: Cutting | None, synchronizers: Sequence[Any] = (SERVED,)) -> Node:
    if cutting is None or len(cutting.sizes) == 1:
        return Node(name, REDUCED)
    own = [synchronizers[index % len(synchronizers)] for index in range(len(cutting.sizes))]
    return Node.partitioned(item.variable(name), cutting.axis, own, sizes=cutting.sizes)


def cut(item: GraphItem, nodes: Sequence[Node], *, where: Place = TWO_WORKERS, strict: bool = True) -> Program:
    """`item` after the pass; variables without a node are whole."""
    named = {node.var_name: node for node in nodes}
    config = tuple(named.get(one.name, Node(one.name, REDUCED)) for one in item.trainable_variables)
    program = Partition()(start(item, Strategy(config, (DEVICE,)), where, Options(strict=strict)))
    verify(program)
    return program


def shard_values(program: Program, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values, with those of the shards."""
    found = dict(values)
    for shards in program.shards:
        parts = np.split(values[shards.variable], np.cumsum(shards.sizes)[:-1], axis=shards.axis)
        found |= dict(zip(shards.names, parts, strict=True))
    return found


class Step(NamedTuple):
    """A step as it is captured."""

    item: GraphItem
    values: dict[str, np.ndarray]
    state: Mapping[str, tf.Tensor]


def run(
    item: GraphItem, state: Mapping[str, tf.Tensor], values: dict[str, np.ndarray], steps: Sequence[Any]
) -> tuple[list[Any], dict[str, np.ndarray]]:
    """What the steps return on one device, and the variables after them."""
    variables = {name: tf.Variable(value) for name, value in values.items()}
    strategy = Strategy(tuple(Node(one.name, REDUCED) for one in item.trainable_variables), (DEVICE,))
    compiled = compile(item, strategy, programs.place(1))
    executor = Executor(compiled, {(name, 0): variable for name, variable in variables.items()}, state)
    results = [[np.array(one) for one in executor.run(list(map(tf.constant, feeds)))] for feeds in steps]
    return results, {name: variable.numpy() for name, variable in variables.items()}


def require_same(step: Step, program: Program, steps: Sequence[Any]) -> None:
    """Both compute the same results and variables: those that are cut are what their shards make, joined."""
    item, values, state = step
    wanted, whole = run(item, state, values, steps)
    got, parts = run(program.item, state, shard_values(program, values), steps)
    for mine, theirs in zip(got, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert any(not np.array_equal(whole[one.name], values[one.name]) for one in item.trainable_variables)
    cuts = {shards.variable: shards for shards in program.shards}
    for name, value in whole.items():
        if name in cuts:
            joined = np.concatenate([parts[one] for one in cuts[name].names], axis=cuts[name].axis)
            np.testing.assert_allclose(joined, value, rtol=1e-9, atol=1e-12, err_msg=name)
        if name not in cuts or cuts[name].is_whole:
            np.testing.assert_allclose(parts[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def captured(step: Callable[..., Any], *arguments: Any) -> Step:
    found = capture(step, *map(tf.constant, arguments))
    return Step(found.item, {name: variable.numpy() for name, variable in found.variables.items()}, found.state)


# -- Any shape, any update --------------------------------------------------------------------------------------------


@st.composite
def cuttings(draw: Any) -> tuple[tuple[int, ...], Cutting]:
    """The shape of a variable, an axis of it, and sizes of 1 to 5 shards along that, even or not."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    inner = draw(st.sets(st.integers(1, max(1, shape[axis] - 1)), max_size=min(4, shape[axis] - 1)))
    edges = [0, *sorted(inner), shape[axis]]
    return shape, Cutting(axis, [after - before for before, after in itertools.pairwise(edges)])


def updated(kind: str, shape: Sequence[int]) -> Callable[..., Any]:
    """A step whose variable `w` has a gradient of its own shape, dense or of rows, and an update of that kind."""
    rng = np.random.default_rng(3)
    w = tf.Variable(rng.normal(size=shape), name="w")
    m, v = (tf.Variable(rng.uniform(0.5, 1, size=shape), name=name, trainable=False) for name in "mv")
    rate = tf.Variable(0.1, name="rate", trainable=False, dtype=tf.float64)
    mask = tf.constant(rng.integers(0, 2, size=shape).astype(np.float64))

    def step(x: tf.Tensor) -> Any:
        is_sparse = kind.endswith("-rows")
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(w, tf.cast(x[:, 0], tf.int64) % shape[0]) if is_sparse else w * mask
            loss = tf.reduce_mean(x) * tf.reduce_sum(rows**2) + tf.reduce_mean(x**2)
        gradient = tape.gradient(loss, w)
        norm = tf.constant(0.0, tf.float64)
        if kind.startswith("clipped"):
            (gradient,), norm = tf.clip_by_global_norm([gradient], 0.3)
        if kind.startswith("fused"):
            handles = {"var": w.handle, "m": m.handle, "v": v.handle}
            numbers = {
                "beta1_power": 0.9,
                "beta2_power": 0.99,
                "lr": rate,
                "beta1": 0.9,
                "beta2": 0.99,
                "epsilon": 1e-3,
            }
            if is_sparse:
                raw.ResourceSparseApplyMomentum(
                    var=w.handle,
                    accum=m.handle,
                    lr=rate,
                    grad=gradient.values,
                    indices=gradient.indices,
                    momentum=tf.constant(0.9, tf.float64),
                )
            else:
                numbers = {key: tf.cast(value, tf.float64) for key, value in numbers.items()}
                raw.ResourceApplyAdam(**handles, **numbers, grad=gradient)
        elif is_sparse:
            rows, positions = tf.unique(gradient.indices)
            values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
            v.scatter_add(tf.IndexedSlices(values**2, rows))
            w.scatter_sub(tf.IndexedSlices(rate * values / tf.sqrt(tf.gather(v, rows)), rows))
        else:
            m.assign(0.9 * m + tf.where(mask > 0, gradient, 2.0 * gradient))
            v.assign_add(tf.square(gradient) + 0.0 * mask)
            w.assign_sub(rate * m / tf.sqrt(v) + 0.01 * w)
        return loss, norm

    return step


KINDS = ("dense", "clipped-dense", "fused-dense", "rows", "clipped-rows", "fused-rows")


@settings(max_examples=25, deadline=None)
@given(cutting=cuttings(), kind=st.sampled_from([f"-{kind}" if kind == "rows" else kind for kind in KINDS]))
def test_a_variable_of_any_shape_may_be_cut_along_any_axis(cutting, kind):
    shape, where = cutting
    steps = [(np.random.default_rng(number).normal(size=(3, 2)) * 4,) for number in range(3)]
    step = captured(updated(kind, shape), *steps[0])
    program = cut(step.item, [node_of(step.item, "w", where)])
    assert bool(program.shards) == (len(where.sizes) > 1)
    require_same(step, program, steps)


def thirds(item: GraphItem, name: str, axis: int) -> Node:
    """The variable in up to three shards along the axis, or along its first."""
    shape = item.variable(name).shape
    axis = min(axis, len(shape) - 1)
    count = min(3, shape[axis])
    sizes = [len(part) for part in np.array_split(np.arange(shape[axis]), count)]
    return node_of(item, name, Cutting(axis, sizes))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("family", FUNCTION_FAMILIES)
@pytest.mark.parametrize(("model", "optimizer"), [("both", "adam"), ("both", "momentum"), ("dense", "adagrad")])
def test_the_update_of_an_optimizer_is_cut_with_its_state(family, model, optimizer, axis):
    training = FUNCTION_FAMILIES[family](model, optimizer, clip=True)(1)
    steps = batches(model)[:3]
    step = captured(training.step, *steps[0])
    program = cut(step.item, [thirds(step.item, variable.name, axis) for variable in step.item.trainable_variables])
    trained = {variable.name for variable in step.item.trainable_variables}
    state = {shards.variable for shards in program.shards} - trained
    assert len(state) == len(program.shards) * (2 if optimizer == "adam" else 1) // (3 if optimizer == "adam" else 2)
    assert not any(shards.is_whole for shards in program.shards if shards.variable in state)
    require_same(step, program, steps)


# -- What is whole, and what is not -----------------------------------------------------------------------------------


def test_rows_are_looked_up_in_the_shards_that_have_them_and_the_table_is_gone():
    step = captured(updated("-rows", (6, 2)), np.ones((3, 2)))
    program = cut(step.item, [node_of(step.item, "w", Cutting(0, (1, 3, 2)))])
    (table,) = (shards for shards in program.shards if shards.variable == "w")
    assert not table.is_whole
    assert "w" not in {variable.name for variable in program.item.variables}
    assert "w" not in program.graph.nodes
    assert [program.item.variable(name).shape for name in table.names] == [(1, 2), (3, 2), (2, 2)]
    require_same(step, program, [(np.array([[5.0, 0.0], [0.0, 1.0], [5.0, 2.0]]),)] * 3)


def test_scalars_stay_one():
    step = captured(updated("clipped-dense", (4,)), np.ones((3, 2)))
    program = cut(step.item, [node_of(step.item, "w", Cutting(0, (2, 2)))])
    assert {shards.variable for shards in program.shards} == {"w", "m", "v"}
    assert "rate" in {variable.name for variable in program.item.variables}
    (norm,) = {op for op in program.graph.nodes if op.endswith("global_norm")}
    assert shard_name(norm, 0) not in program.graph.nodes


def test_where_all_shards_are_reduced_the_gradient_alone_is_cut():
    step = captured(updated("clipped-dense", (4, 3)), np.ones((3, 2)))
    program = cut(step.item, [node_of(step.item, "w", Cutting(1, (1, 2)), [REDUCED])])
    assert not program.shards
    assert [gradient.variable for gradient in program.item.gradients] == ["w/part_0", "w/part_1"]
    assert [program.item.variable(name).shape for name in ("w/part_0", "w/part_1")] == [(4, 1), (4, 2)]
    require_same(step, program, [(np.full((3, 2), number),) for number in (1.0, 2.0, 3.0)])


@pytest.mark.parametrize("synchronizers", [(SERVED, REDUCED), (REDUCED,)])
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_a_sparse_gradient_go_to_their_shards_whatever_synchronizes_them(synchronizers, axis):
    step = captured(updated("-rows", (5, 4)), np.ones((3, 2)))
    program = cut(
        step.item, [node_of(step.item, "w", Cutting(axis, (3, 1)) if axis else Cutting(0, (2, 3)), synchronizers)]
    )
    require_same(step, program, [(np.random.default_rng(number).normal(size=(4, 2)) * 5,) for number in range(3)])


def uses(what: str) -> Callable[..., Any]:
    """A step that uses a variable, its state or its gradient in another way than by its update."""
    w = tf.Variable(np.linspace(-1, 1, 6).reshape(3, 2), name="w")
    m = tf.Variable(np.full((3, 2), 0.5), name="m", trainable=False)

    @tf.function
    def halved(value: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(2):
            value = value + 0.1 * w
        return value

    def step(x: tf.Tensor) -> Any:
        ids = tf.constant([0, 2, 2])
        with tf.GradientTape() as tape:
            weights = w
            if what == "in a loop":
                weights = halved(w)
            elif what == "under a condition":
                weights = tf.cond(x[0, 0] > 1.5, lambda: 2.0 * w, lambda: w + 1.0)
            elif what == "tied":
                weights = w + tf.reduce_sum(tf.gather(w, ids), axis=0)
            loss = tf.reduce_mean(tf.matmul(x, weights) ** 2)
        if what == "two gradients":
            with tf.GradientTape() as first:
                one = tf.reduce_mean(tf.matmul(x, w) ** 2)
            with tf.GradientTape() as second:
                other = tf.reduce_mean(tf.nn.embedding_lookup(w, ids) ** 2) * tf.reduce_mean(x)
            gradient = first.gradient(one, w)
            rows = second.gradient(other, w)
            w.scatter_sub(tf.IndexedSlices(0.1 * rows.values, rows.indices))
        else:
            gradient = tape.gradient(loss, w)
        before = tf.reduce_max(m) if what == "state before" else tf.constant(0.0, tf.float64)
        m.assign(0.9 * m + gradient)
        w.assign_sub(0.1 * m)
        results = {"loss": loss, "before": before}
        if what == "gradient returned":
            results |= {"gradient": gradient, "norm": tf.norm(gradient), "column": tf.reduce_sum(gradient, axis=0)}
        if what == "new value returned":
            results |= {"w": w.read_value(), "m": m + 0.0, "product": tf.matmul(x, w)}
        return results

    return step


WAYS = (
    "in a loop",
    "under a condition",
    "tied",
    "two gradients",
    "gradient returned",
    "new value returned",
    "state before",
)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("what", WAYS)
def test_what_else_uses_a_variable_sees_it_whole(what, axis):
    steps = [(np.random.default_rng(number).normal(size=(4, 3)) + 1.5,) for number in range(3)]
    step = captured(uses(what), *steps[0])
    program = cut(step.item, [node_of(step.item, "w", Cutting(axis, (2, 1) if axis == 0 else (1, 1)))])
    assert {shards.variable for shards in program.shards} == {"w", "m"}
    assert {shards.variable: shards.is_whole for shards in program.shards}["w"]
    require_same(step, program, steps)


# -- What cannot be cut -----------------------------------------------------------------------------------------------


def stepping(optimizer: keras.optimizers.Optimizer) -> Callable[..., Any]:
    w = keras.Variable(np.linspace(-1, 1, 6).reshape(3, 2), dtype="float64", name="w")
    optimizer.build([w])

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, w.value) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, w.value), w)])
        return loss

    return step


def refused() -> dict[str, tuple[Callable[..., Any], str]]:
    keras.config.set_floatx("float64")
    between = tf.Variable(np.ones((3, 2)), name="w")

    def reads_between(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, between) ** 2)
        between.assign_sub(0.1 * tape.gradient(loss, between))
        seen = tf.linalg.trace(tf.matmul(between, between, transpose_a=True))
        between.assign_sub(0.01 * between)
        return loss, seen

    table = tf.Variable(np.arange(12.0).reshape(6, 2), name="w")

    def rows_in_their_order(x: tf.Tensor) -> Any:
        """Each row is scaled by what belongs to its example."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, [5, 0, 5, 2]) ** 2) * tf.reduce_mean(x)
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(gradient.values * x[:, 1:2], gradient.indices))
        return loss

    def rows_returned(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, [5, 0, 5, 2]) ** 2) * tf.reduce_mean(x)
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
        return gradient.indices

    def rows_of_two(x: tf.Tensor) -> Any:
        gradients = []
        for ids in ([0, 5], [5, 0]):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(table, ids) ** 2) * tf.reduce_mean(x)
            gradients.append(tape.gradient(loss, table))
        one, other = gradients
        table.scatter_sub(tf.IndexedSlices(one.values - other.values, one.indices))
        return loss

    def columns_of_rows(x: tf.Tensor) -> Any:
        """A sum over the columns alone, of which there is one row."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, [3]) ** 2) * tf.reduce_mean(x)
        gradient = tape.gradient(loss, table)
        norm = tf.sqrt(tf.reduce_sum(gradient.values**2, axis=1, keepdims=True))
        table.scatter_sub(tf.IndexedSlices(gradient.values / (1.0 + norm), gradient.indices))
        return loss

    def as_many_as_rows(x: tf.Tensor) -> Any:
        """A sum for each row of the table: there are as many ids as rows."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, [5, 0, 5, 2, 1, 1]) ** 2) * tf.reduce_mean(x)
        gradient = tape.gradient(loss, table)
        sums = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, raw.Size(input=gradient.indices))
        table.assign_sub(0.1 * sums)
        return loss

    def of_a_statistic(x: tf.Tensor) -> Any:
        """The update is made of a mean over the examples."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x[:, :2], between, transpose_b=True) ** 2)
        change = 0.1 * tape.gradient(loss, between) + 0.01 * between * tf.reduce_mean(x)
        between.assign_sub(change)
        return loss

    return {
        "of a statistic": (of_a_statistic, r"'\w+/statistic_mean' \(Identity\)"),
        "rows in their order": (rows_in_their_order, r"'mul\w*' \(Mul\)"),
        "rows returned": (rows_returned, r"a result is made of rows of its gradient"),
        "rows of two": (rows_of_two, r"'sub\w*' \(Sub\)"),
        "columns of rows": (columns_of_rows, r"'Sum\w*' \(Sum\)"),
        "as many as rows": (as_many_as_rows, r"'UnsortedSegmentSum' \(UnsortedSegmentSum\)"),
        "adafactor": (stepping(keras.optimizers.Adafactor(0.1)), r"'adafactor\w*/Mean' \(Mean\)"),
        "accumulation": (
            stepping(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
            r"'sgd\w*/cond' \(If\)",
        ),
        "between": (reads_between, r"reads 'w' between two of its writes"),
    }


REFUSED = (
    "of a statistic",
    "rows in their order",
    "rows returned",
    "rows of two",
    "columns of rows",
    "as many as rows",
    "adafactor",
    "accumulation",
    "between",
)


@pytest.mark.parametrize("what", REFUSED)
def test_an_update_that_is_not_element_wise_is_refused_by_name_or_left_whole(what):
    cases = refused()
    assert tuple(cases) == REFUSED
    function, message = cases[what]
    step = captured(function, np.ones((4, 3)))
    (name,) = (variable.name for variable in step.item.trainable_variables)
    node = node_of(step.item, name, Cutting(0, (2, 1)))
    with pytest.raises(StrategyError, match=rf"variable '{name}' cannot be cut into shards: .*{message}"):
        cut(step.item, [node])
    program = cut(step.item, [node], strict=False)
    assert program.left_whole.keys() == {name}
    assert program.strategy.node(name) == Node(name, SERVED)
    require_same(step, program, [(np.full((4, 3), number),) for number in (1.0, 2.0, 3.0)])
    own = PSSynchronizer("127.0.0.2:CPU:0")
    program = cut(step.item, [Node(name, own, node.partitioner, node.part_config, node.part_sizes)])
    assert program.strategy.node(name) == Node(name, own), "its builder says what becomes of it"


def test_state_that_is_made_of_other_state_is_cut_too():
    step = captured(stepping(keras.optimizers.Adam(0.1, amsgrad=True)), np.ones((4, 3)))
    (name,) = (variable.name for variable in step.item.trainable_variables)
    program = cut(step.item, [node_of(step.item, name, Cutting(0, (2, 1)))])
    assert len(program.shards) == 4
    assert [shards.variable for shards in program.shards if shards.is_whole] == [name]
    require_same(step, program, [(np.full((4, 3), number),) for number in (1.0, 2.0, -3.0)])


def test_a_whole_read_is_over_before_the_new_value_is_there():
    with tf.Graph().as_default() as graph:
        x = programs.placeholder("x", None, 2)
        w = programs.handle("w", 3, 2)
        old = programs.read(w)
        error = raw.MatMul(a=x, b=old, transpose_b=True, name="error")
        summed = raw.MatMul(a=error, b=x, transpose_a=True, name="summed")
        gradient = raw.Identity(input=summed, name="gradient/w")
        raw.AssignSubVariableOp(resource=w, value=raw.Mul(x=gradient, y=old, name="scaled"), name="update")
        item = programs.captured(
            graph,
            variables=[Variable("w", "float64", (3, 2), update_ops=("update",))],
            gradients=[Gradient("w", ("gradient/w:0",))],
            inputs=[Input("x", "float64", (None, 2), batched=True)],
            outputs=[old],
            run_ops=["update"],
        )
    program = cut(item, [node_of(item, "w", Cutting(0, (2, 1)))])
    assert "^w/Read" in program.graph.nodes["w/joined"].input


def test_rows_are_looked_up_before_they_are_written():
    table = tf.Variable(np.arange(12.0).reshape(6, 2), name="w")

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.raw_ops.GatherV2(params=table, indices=[5, 1], axis=0)) * tf.reduce_mean(x)
        gradient = tape.gradient(loss, table)
        late = tf.raw_ops.GatherV2(params=table, indices=tf.cast(x[:, 0], tf.int32), axis=0)
        table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
        return loss, late

    found = captured(step, np.ones((3, 2)))
    program = cut(found.item, [node_of(found.item, "w", Cutting(0, (2, 4)))])
    assert not program.shards[0].is_whole
    lookups = [name for name, node in program.graph.nodes.items() if node.op == "ResourceGather"]
    (write,) = (name for name in program.graph.nodes if name.endswith("ResourceScatterSub/part_1"))
    assert len(lookups) == 4
    own = {name for name in lookups if name.endswith("/part_1")}
    assert own <= program.graph.ancestors([write])
    require_same(found, program, [(np.array([[5.0, 0.0], [0.0, 1.0], [3.0, 2.0]]),)] * 3)


def test_a_gradient_that_updates_nothing_is_not_cut():
    w = tf.Variable(np.ones((4, 2)), name="w")

    def norm(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
        return tf.norm(tape.gradient(loss, w))

    found = captured(norm, np.ones((3, 4)))
    program = cut(found.item, [node_of(found.item, "w", Cutting(0, (2, 2)))])
    assert (program.shards, program.left_whole, program.strategy.node("w").shards) == ((), {}, ())


def test_one_replica_is_left_as_it_is():
    step = captured(updated("dense", (4,)), np.ones((3, 2)))
    program = cut(step.item, [node_of(step.item, "w", Cutting(0, (2, 2)))], where=programs.place(1))
    assert (program.item, program.shards) == (step.item, ())


def test_what_a_removed_op_was_waited_for_is_waited_for_still():
    step = captured(uses("new value returned"), np.ones((4, 3)))
    program = cut(step.item, [node_of(step.item, "w", Cutting(0, (2, 1)))])
    view: GraphView = program.graph
    reads = [node for node in view.nodes.values() if node.op == "ReadVariableOp" and node.input[0] == "w"]
    late = [node for node in reads if "^w/joined" in node.input]
    assert late and len(late) < len(reads), "those behind the update wait for the whole variable, others do not"
