"""Large gradients in pieces, and what is computed first: which ops stand in the graph, and what waits for what."""

import networkx as nx
import pytest
import tensorflow as tf

from autodist_py.kernel.events import ReduceGradients
from autodist_py.kernel.ir.names import on_replica
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from tests.support import kernel_programs
from tests.support.dense_layers import stepping, two_layers, weight

FEATURES, WIDE, OUT = 6, 8, 4
SMALL = 2 * WIDE * 8
"""The bytes of two rows of the wide layer's gradient."""


def item_of(loss, variables):
    return stepping(loss, variables, tf.ones([4, FEATURES], tf.float64))


def ordered(item, *where, worker=0, **parameters):
    """The program of that worker after all passes."""
    synchronizer = AllReduceSynchronizer(**{"factors": False, "bytes_per_pack": SMALL, **parameters})
    nodes = tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables)
    topology = kernel_programs.topology(*(where or (1, 1)), worker=worker)
    return kernel_programs.after("order", item, topology, Strategy(nodes, ("127.0.0.1:CPU:0",)))


def in_pieces(program):
    """The variables whose gradients are in pieces."""
    events = program.schedule.of_kind(ReduceGradients)
    return {event.variables for event in events if getattr(event, "product", None) is not None}


def products(program, event):
    """The ops of an event that multiply matrices."""
    return [node for node in program.graph.of_type({"MatMul"}) if node.name.startswith(f"{event.scope}/")]


# -- Pieces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_pieces_of_a_gradient_are_products_of_their_own_and_each_a_collective(replicas):
    program = ordered(two_layers(FEATURES, WIDE, OUT), replicas, 1)
    assert in_pieces(program) == {"wide", "out"}
    for event in program.schedule.of_kind(ReduceGradients):
        position = program.schedule.events.index(event)
        made = [one for one in program.lowered.collectives if one.event == position]
        count = {"wide": 3, "out": 2}[event.variables]
        assert len(made) == count
        assert len(products(program, event)) == count * replicas
        assert sum(one.nbytes for one in made) == event.nbytes
        raw = event.product.right.op
        assert not program.graph.users([on_replica(0, raw)])[on_replica(0, raw)], "it is computed twice"


def test_a_piece_is_computed_after_the_one_before_it():
    program = ordered(two_layers(FEATURES, WIDE, OUT))
    for event in program.schedule.of_kind(ReduceGradients):
        for earlier, later in zip(products(program, event)[:-1], products(program, event)[1:], strict=True):
            assert f"^{earlier.name}" in later.input


@pytest.mark.parametrize(
    ("where", "parameters"),
    [
        ((2,), {}),  # Nothing leaves the worker.
        ((1, 1), {"bytes_per_pack": 0}),  # All are smaller than a buffer.
        ((1, 1), {"spec": "HOROVOD"}),  # It sends them whole.
        ((1, 1), {"compressor": "HorovodCompressor"}),
    ],
)
def test_others_are_reduced_as_they_are(where, parameters):
    item = two_layers(FEATURES, WIDE, OUT)
    synchronizer = AllReduceSynchronizer(**{"factors": False, "bytes_per_pack": SMALL, **parameters})
    nodes = tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables)
    strategy = Strategy(nodes, ("127.0.0.1:CPU:0",))
    events = kernel_programs.gradient_events(item, kernel_programs.topology(*where), strategy)
    assert [getattr(event, "product", None) for event in events] == [None] * len(events)


@pytest.mark.parametrize("rows", [1, 3])
def test_pieces_are_no_larger_than_a_buffer(rows):
    """Of three rows, of which one alone goes into a buffer; and one row is no piece of anything."""
    kernel = weight(rows, WIDE, name="kernel")
    item = item_of(lambda x: tf.reduce_mean((x[:, :rows] @ kernel) ** 2), [kernel])
    program = ordered(item, bytes_per_pack=WIDE * 8 * 5 // 4 if rows > 1 else WIDE * 4)
    sizes = [one.nbytes for one in program.lowered.collectives if "dense gradients" in one.what]
    assert in_pieces(program) == ({"kernel"} if rows > 1 else set())
    assert sizes == [WIDE * 8] * rows


def test_no_gradient_is_computed_twice_where_the_step_reads_what_it_is_made_from():
    kernel = weight(FEATURES, WIDE, name="kernel")

    @tf.custom_gradient
    def layer(x, kernel):
        def back(dy):
            product = tf.matmul(x, dy, transpose_a=True)
            return dy @ tf.transpose(kernel) * tf.norm(product), tf.identity(product)

        return x @ kernel, back

    scale = weight(FEATURES, name="scale")
    item = item_of(lambda x: tf.reduce_mean(layer(x * scale, kernel) ** 2), [kernel, scale])
    assert in_pieces(ordered(item)) == set()


# -- What is computed first --------------------------------------------------------------------------------------------


def waits(program, op, other):
    """Whether `op` waits for `other`."""
    return nx.has_path(program.graph.digraph, other, op)


def test_what_goes_on_in_back_propagation_waits_for_the_last_piece():
    program = ordered(two_layers(FEATURES, WIDE, OUT), 2, 1)
    ((first, rival),) = program.schedule.computed_first
    last = [event for event in program.schedule.of_kind(ReduceGradients) if event.variables == "out"]
    assert last[0].product.right.op == first
    for replica in range(2):
        own = [one.name for one in products(program, last[0]) if waits(program, on_replica(replica, rival), one.name)]
        assert len(own) == 2
        whole = on_replica(replica, first)
        assert whole not in program.graph.producers[on_replica(replica, rival)], "it would be computed for that alone"


def test_what_goes_on_waits_for_a_gradient_that_fills_half_of_a_buffer():
    item = two_layers(FEATURES, WIDE, OUT)
    half = ordered(item, bytes_per_pack=2 * WIDE * OUT * 8)
    ((first, rival),) = half.schedule.computed_first
    assert f"^{on_replica(0, first)}" in half.graph.nodes[on_replica(0, rival)].input
    assert ordered(item, bytes_per_pack=4 * WIDE * OUT * 8).schedule.computed_first == ()
    assert ordered(item, 2).schedule.computed_first == ()


def test_what_a_gradient_is_made_from_does_not_wait_for_it():
    kernel = weight(FEATURES, FEATURES, name="kernel")

    @tf.custom_gradient
    def layer(x, kernel):
        def back(dy):
            onward = tf.matmul(dy, kernel, transpose_b=True)
            return onward, tf.matmul(onward, dy, transpose_a=True)

        return x @ kernel, back

    scale = weight(FEATURES, name="scale")
    item = item_of(lambda x: tf.reduce_mean(layer(x * scale, kernel) ** 2), [kernel, scale])
    program = ordered(item)
    assert program.schedule.computed_first == ()
    assert nx.is_directed_acyclic_graph(program.graph.digraph)


def test_gradients_of_what_is_added_up_do_not_wait_for_one_another():
    """They are products of the same factor, and are sent in another order than that in which they stand."""
    one, other = (weight(FEATURES, WIDE, name=name) for name in ("one", "other"))
    item = item_of(lambda x: tf.reduce_mean(tf.tanh(x @ one + tf.tanh(x) @ other) ** 2), [one, other])
    assert in_pieces(ordered(item)) == {"one", "other"}
    assert ordered(item).schedule.computed_first == ()


def test_all_workers_compute_in_one_order():
    item = two_layers(FEATURES, WIDE, OUT)
    first, second = (ordered(item, 2, 1, worker=worker).schedule for worker in range(2))
    assert first == second
    assert first.computed_first
