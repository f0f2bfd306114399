"""The schedule of a step: what it says, that it has no cycle, and that what is lowered is what it says."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel import schedule as module
from autodist_py.kernel.analysis.event_graph import Waits
from autodist_py.kernel.collectives.groups import gradient_events
from autodist_py.kernel.events import Exchange, FetchResults, GatherFactors, ReduceGradients, ReduceStatistics
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.errors import InvalidGraphError
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from tests.support import capture_steps, kernel_programs
from tests.support.crossed_steps import CROSSED, compiled
from tests.support.packed import three_layers

DEVICES = ("127.0.0.1:CPU:0", "127.0.0.2:CPU:0")


def whats(program, kind):
    return [event.what for event in program.schedule.of_kind(kind)]


@pytest.mark.parametrize("name", CROSSED)
def test_parts_that_depend_on_one_another_crosswise_have_one_schedule_on_all_workers(name):
    first, *others = (compiled(name, worker=worker, replicas=(2, 1)) for worker in range(2))
    assert [str(one.schedule) for one in others] == [str(first.schedule)]


def test_a_bucket_that_would_wait_for_itself_is_split_there():
    program = compiled("buckets")
    assert whats(program, ReduceGradients) == [f"dense gradients of {name}" for name in "aef"]
    events = [event.what for event in program.schedule.events if "rows of" not in event.what]
    (sent,) = (what for what in events if "gradients of c, " in what)
    assert events.index("dense gradients of e") < events.index(sent) < events.index("dense gradients of f")


def test_a_message_that_would_wait_for_itself_is_split_there():
    program = compiled("messages")
    sent = [([one.variable for one in event.gradients], len(event.values)) for event in events_of(program, Exchange)]
    assert sent == [(["p"], 0), ([], 1)]


def test_statistics_that_would_wait_for_themselves_are_split_there():
    program = compiled("statistics")
    first, second = events_of(program, ReduceStatistics)
    assert (first.level, first.phase) == (second.level, second.phase)
    (sent,) = (event for event in events_of(program, Exchange) if event.server == 0)
    assert [one.variable for one in sent.gradients] == ["a", "a2"]
    order = list(program.schedule.events)
    assert order.index(first) < order.index(sent) < order.index(second)


def test_a_result_that_would_let_a_bucket_wait_for_itself_travels_alone():
    program = compiled("results")
    (bucket,) = (event for event in events_of(program, ReduceGradients) if event.variables == "e, e2")
    result = program.item.outputs[-1]
    assert len(bucket.outputs) == 4
    assert result not in bucket.outputs
    assert result in [output for event in events_of(program, FetchResults) for output in event.outputs]


def events_of(program, kind):
    return program.schedule.of_kind(kind)


def test_events_that_wait_for_one_another_and_cannot_be_split_are_named(monkeypatch):
    monkeypatch.setattr(module, "waits", lambda program, events, servers: Waits((0,) * len(events), (0,)))
    with pytest.raises(
        InvalidGraphError, match=r"none of them can be split:\nAllReduceBucket\[RING, level 1, 24 bytes of each of 2\]"
    ):
        kernel_programs.after("plan-communication", kernel_programs.linear_regression(), kernel_programs.topology(1, 1))


def test_a_bucket_none_of_whose_gradients_waits_for_the_cycle_is_left_whole(monkeypatch):
    item, strategy = trained(tf.float64, "NoneCompressor")
    monkeypatch.setattr(module, "waits", lambda program, events, servers: Waits((0,) * len(events), (0,)))
    with pytest.raises(InvalidGraphError, match=r"none of them can be split:\nAllReduceBucket.* of a, b"):
        kernel_programs.after("plan-communication", item, kernel_programs.topology(1, 1), strategy)


def test_the_parts_of_a_bucket_are_listed_as_they_are_ready():
    program = kernel_programs.started(kernel_programs.dense_and_sparse(), kernel_programs.topology(1, 1))
    events = tuple(gradient_events(program))
    (position,) = (index for index, event in enumerate(events) if event.variables == "a, b")
    early = program.analysis.captured.nodes["gradient/a"].input[0]
    draft = module._Draft(program, events, (), None)._with_gradients(position, frozenset({early}))
    assert draft is not None
    parts = [event for event in draft.gradients if event.variables in ("a", "b")]
    assert [event.variables for event in parts] == ["a", "b"]  # `a` waits for the cycle, and is ready first.
    assert [event.depth for event in draft.gradients] == sorted(event.depth for event in draft.gradients)


def test_the_parts_of_an_event_of_factors_are_such_events():
    item = three_layers(side=4)
    program = kernel_programs.started(item, kernel_programs.topology(1, 1))
    synchronizer = AllReduceSynchronizer(factors=True)
    nodes = tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables)
    program = replace(program, strategy=Strategy(nodes, DEVICES))
    (event,) = gradient_events(program)
    late = program.analysis.captured.nodes[op_of(event.gradients[-1].tensors[0])].input[0]
    draft = module._Draft(program, (event,), (), None)._with_gradients(0, frozenset({op_of(late)}))
    assert draft is not None
    found = [part for part in draft.gradients if isinstance(part, GatherFactors)]
    assert [(part.variables, len(part.factors)) for part in found] == [("w2, w1", 4), ("w0", 2)]


@pytest.mark.parametrize(
    ("late", "parts"), [("", ["abc", ""]), ("b", ["ac", "b"]), ("abc", ["a", "bc"])], ids=["none", "one", "all"]
)
def test_what_waits_for_the_cycle_goes_apart_and_if_all_does_all_but_the_first_by_name(late, parts):
    assert ["".join(sorted(part)) for part in module._apart("bca", str, late.__contains__)] == parts


# -- What it says -----------------------------------------------------------------------------------------------------


def test_one_replica_has_nothing_to_tell():
    program = kernel_programs.after(
        "plan-communication", kernel_programs.linear_regression(), kernel_programs.topology(1)
    )
    assert program.schedule.events == ()


def test_what_stays_on_one_worker_is_said_to():
    item = kernel_programs.linear_regression()
    program = kernel_programs.after("order", item, kernel_programs.topology(2))
    assert list(map(str, program.schedule.events)) == [
        "FetchResults[LOCAL, level 0] fetches loss:0",
        "AllReduceBucket[LOCAL, level 1] dense gradients of w",
    ]
    assert program.lowered.collectives == ()


def trained(dtype, compressor):
    weights = [tf.Variable(np.ones((3, 2)), dtype=dtype, name=name) for name in "ab"]
    average = tf.Variable(tf.zeros([2], dtype), trainable=False, name="average")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(x, dtype) @ (weights[0] + weights[1])))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        average.assign(tf.reduce_mean(tf.cast(x, dtype) @ weights[0], axis=0))
        return loss, tf.reduce_sum(x, axis=0)

    item = capture_steps.capture(step, tf.ones([4, 3], tf.float64)).item
    synchronizer = AllReduceSynchronizer("AUTO", compressor)
    return item, Strategy(
        tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables), DEVICES[:1]
    )


@pytest.mark.parametrize("batch", ["global", "local"])
@pytest.mark.parametrize(
    ("dtype", "compressor"),
    [
        (tf.float64, "NoneCompressor"),
        (tf.bfloat16, "NoneCompressor"),
        (tf.float32, "HorovodCompressor"),
    ],
)
def test_the_bytes_of_an_event_are_those_that_its_collectives_are_given(dtype, compressor, batch):
    item, strategy = trained(dtype, compressor)
    program = kernel_programs.after("order", item, kernel_programs.topology(2, 1), strategy, batch=batch)
    shapes = GraphView(program.graph.graph_def()).shapes
    given = [0] * len(program.schedule.events)
    for one in program.lowered.collectives:
        node = program.graph.nodes[one.ops[0]]
        read, _, index = node.input[0].partition(":")
        given[one.event] += shapes[read][int(index or 0)].num_elements() * tf.as_dtype(node.attr["T"].type).size
    assert [event.nbytes for event in program.schedule.events] == given
    assert all(given)
