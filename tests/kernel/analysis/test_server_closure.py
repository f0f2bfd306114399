"""What one server holds, runs and is sent, and for which reads it waits, each found alone."""

import pytest
import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.graph import GraphScope, Signature
from autodist_py.kernel.analysis.server_closure import Closure, Holding
from autodist_py.kernel.analysis.server_reads import Reads
from autodist_py.kernel.analysis.server_split import WORKERS, Division
from autodist_py.kernel.program import Program
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import GraphItem
from tests.support import kernel_programs
from tests.support.loop_programs import control_flow_of_tensorflow_1


def divided(item: GraphItem, *sides: int) -> tuple[Program, Division]:
    """`item` before the first pass, with its gradients combined on these sides."""
    program = kernel_programs.started(item, kernel_programs.topology(1, 1))
    return program, Division(program, dict(zip(item.gradients, sides, strict=True)))


def test_a_server_runs_the_update_and_copies_of_what_it_is_computed_from():
    program, division = divided(kernel_programs.linear_regression(), 0)
    own = Holding.of(division, 0)
    assert own == Holding(0, frozenset({"w"}), frozenset({"gradient/w"}), frozenset({"gradient/w", "step", "update"}))
    closure = Closure.of(program, division, own)
    assert closure == Closure(
        ops=frozenset({"rate", "step", "update"}),
        values=frozenset(),
        mirrored_ops=frozenset(),
        given=frozenset({"gradient/w"}),
    )


@pytest.mark.parametrize(("sides", "held"), [((0, 1), ("v1",)), ((1, 1), ("v0", "v1")), ((1, WORKERS), ("v0",))])
def test_a_server_holds_the_variables_of_its_side_alone(sides, held):
    _, division = divided(kernel_programs.two_stages(), *sides)
    assert Holding.of(division, 1).held == set(held)


@pytest.mark.parametrize(
    ("late", "before"),
    [({"v0/Read"}, {"update_0": {"v0/Read"}}), ({"v1/Read"}, {}), (set(), {})],
    ids=["of-its-variable", "of-another", "none"],
)
def test_a_server_waits_for_what_reads_its_variable_late_and_before_the_write(late, before):
    program, division = divided(kernel_programs.two_stages(), 0, 1)
    reads = Reads.of(program, division, Holding.of(division, 0), mirrored_ops=(), late=late)
    assert (reads.before, reads.recounted) == (before, {})


def rate_of_a_branch(*, prints: bool, by_count: bool = False) -> GraphItem:
    """A variable that is trained at a rate which is a constant in each branch of TensorFlow 1, or a count's part."""
    scope = GraphScope(tf.Graph(), CaptureOptions(), seed=None)
    with control_flow_of_tensorflow_1(), scope.graph.as_default(), scope.recording():
        x = tf.compat.v1.placeholder(tf.float32, (None,), name="x")
        weight, count = (tf.compat.v1.get_variable(name, (), use_resource=True) for name in ("weight", "count"))

        def slow() -> tf.Tensor:
            with tf.control_dependencies([tf.print("slow")] if prints else []):
                return tf.constant(0.1) / count if by_count else tf.constant(0.1)

        rate = tf.cond(count > 1.0, slow, lambda: tf.constant(1.0))
        loss = tf.reduce_mean(x * weight)
        train = tf.group(weight.assign_sub(rate * tf.gradients(loss, weight)[0]), name="train")
    return scope.cut(Signature(("x:0",), (loss.name,), (train.name,)), CaptureOptions())


def test_a_server_runs_the_switch_for_which_a_constant_of_a_branch_waits():
    program, division = divided(rate_of_a_branch(prints=False), 0)
    ops = Closure.of(program, division, Holding.of(division, 0)).ops
    assert {"cond/Const", "cond/Const_1", "cond/switch_t", "cond/switch_f", "cond/Switch"} <= ops


def test_a_constant_that_waits_in_its_branch_for_what_workers_run_is_refused():
    program, division = divided(rate_of_a_branch(prints=True), 0)
    with pytest.raises(StrategyError, match=r"needs 'cond/Const'.*only as it waits for what workers run there"):
        Closure.of(program, division, Holding.of(division, 0))


def test_such_a_constant_is_not_refused_where_what_takes_it_is_decided_by_another_tensor():
    program, division = divided(rate_of_a_branch(prints=True, by_count=True), 0)
    assert "cond/truediv" in Closure.of(program, division, Holding.of(division, 0)).ops
