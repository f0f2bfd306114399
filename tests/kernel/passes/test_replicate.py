"""Replicate: what is copied, what stands once, and what every copy has of its own."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.ir.graph import DRAWN_ALIKE, GraphView, functions_of
from autodist_py.kernel.ir.names import on_replica, op_of, replica_of
from autodist_py.kernel.pipeline import PASSES
from autodist_py.kernel.runner import run_passes
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.proto.errors import InvalidGraphError
from tests.support import kernel_programs
from tests.support.kernel_programs import node, parsed


def replicated(graph, where, **facts):
    names = [step.name for step in PASSES]
    return run_passes(kernel_programs.program_of(graph, where, **facts), PASSES[: names.index("replicate") + 1])


def replica_1_of(graph, **facts):
    return replicated(graph, kernel_programs.topology(2), **facts).graph


def test_every_op_stands_on_each_replicas_device_and_reads_its_own_replica():
    graph = replica_1_of(parsed("a = Const()", "b = AddV2(a, a:1, ^a)"))
    assert [each.name for each in graph.nodes.values()] == [on_replica(i, name) for i in (0, 1) for name in ("a", "b")]
    there = node(graph, "AutoDist-Replica-1/b")
    assert list(there.input) == ["AutoDist-Replica-1/a", "AutoDist-Replica-1/a:1", "^AutoDist-Replica-1/a"]
    assert [each.device for each in graph.nodes.values()] == ["/device:CPU:0"] * 2 + ["/device:CPU:1"] * 2


@pytest.mark.parametrize(("kind", "there"), [("GPU", "/device:CPU:0"), ("CPU", "/device:CPU:1")])
def test_an_op_that_the_user_put_on_a_cpu_is_on_one_and_any_other_device_is_the_replicas(kind, there):
    """On the replica's own, if it has one."""
    where = Topology(0, tuple(Replica(index, 0, f"/device:{kind}:{index}") for index in range(2)))
    graph = replicated(parsed("a = Const() @/device:CPU:0", "b = Const() @/device:GPU:0"), where).graph
    assert node(graph, "AutoDist-Replica-1/a").device == there
    assert node(graph, "AutoDist-Replica-1/b").device == f"/device:{kind}:1"


def test_what_uses_a_variable_is_where_the_variable_is():
    lines = ("v = VarHandleOp() @/device:CPU:1", "p = Identity(v)", "r = ReadVariableOp(p) @/device:CPU:0")
    graph = replica_1_of(parsed(*lines, "w = VarHandleOp()", "s = ReadVariableOp(w) @/device:CPU:1"))
    assert [node(graph, f"AutoDist-Replica-0/{name}").device[-1] for name in "vprws"] == list("11100")
    assert [node(graph, f"AutoDist-Replica-1/{name}").device[-1] for name in "vprws"] == list("11111")


def test_a_worker_numbers_its_copies_by_local_position():
    program = replicated(parsed("a = Const()"), kernel_programs.topology(2, 1, worker=1))
    assert [each.name for each in program.graph.nodes.values()] == ["AutoDist-Replica-0/a"]


@pytest.mark.parametrize("op", ["Placeholder", "IteratorGetNext", "HashTableV2"])
def test_inputs_iterators_and_tables_stand_once_with_what_they_are_made_from(op):
    graph = parsed("c = Const()", f"s = {op}(c)", "use = Neg(s)")
    program = replicated(graph, kernel_programs.topology(2))
    names = [each.name for each in program.graph.nodes.values()]
    assert names == ["c", "s", "AutoDist-Replica-0/use", "AutoDist-Replica-1/use"]
    assert list(node(program.graph, "AutoDist-Replica-1/use").input) == ["s"]
    assert program.replication.shared == {"c", "s"}
    assert node(program.graph, "s").device == "/device:CPU:0"


def test_an_iterator_that_is_made_from_a_variable_is_refused():
    with pytest.raises(InvalidGraphError, match="value of variable 'v'"):
        replica_1_of(parsed("v = VarHandleOp()", "r = ReadVariableOp(v)", "n = IteratorGetNext(r)"))


def test_the_loops_of_a_replica_have_frames_of_their_own_and_colocation_groups_are_gone():
    graph = parsed("p = Placeholder()", "a = Const()", "e = Enter(a)")
    node(graph, "e").attr["frame_name"].s = b"while/context"
    for name in ("p", "e"):
        node(graph, name).attr["_class"].list.s.append(b"loc:@a")
    result = replica_1_of(graph)
    assert node(result, "AutoDist-Replica-0/e").attr["frame_name"].s == b"AutoDist-Replica-0/while/context"
    assert node(result, "AutoDist-Replica-1/e").attr["frame_name"].s == b"AutoDist-Replica-1/while/context"
    assert not any("_class" in each.attr for each in result.nodes.values())


def test_fetches_are_those_of_the_first_replica_and_every_replica_runs_its_ops():
    from autodist_py.proto.graph_item import Output

    outputs = (Output("a:0", "float32", ()), Output("p:0", "float32", ()))
    graph = parsed("p = Placeholder()", "a = Const()")
    program = replicated(graph, kernel_programs.topology(2), outputs=outputs, run_ops=("a", "p"))
    assert program.fetches == ("AutoDist-Replica-0/a:0", "p:0")
    assert program.run_ops == ("AutoDist-Replica-0/a", "AutoDist-Replica-1/a", "p")


def seeded(seed, seed2):
    graph = parsed("shape = Const()", "r = RandomUniform(shape)")
    node(graph, "r").attr["seed"].i, node(graph, "r").attr["seed2"].i = seed, seed2
    return graph


def seeds(graph, local):
    attributes = node(graph, f"AutoDist-Replica-{local}/r").attr
    return attributes["seed"].i, attributes["seed2"].i


def test_the_clusters_first_replica_keeps_its_seed_and_all_others_have_different_ones():
    first = replicated(seeded(7, 3), kernel_programs.topology(2, 2, worker=0)).graph
    second = replicated(seeded(7, 3), kernel_programs.topology(2, 2, worker=1)).graph
    streams = [seeds(graph, local) for graph in (first, second) for local in (0, 1)]
    assert streams[0] == (7, 3)
    assert len(set(streams)) == 4
    assert all(0 <= seed2 < 2**31 for _, seed2 in streams)


def test_an_unseeded_random_op_stays_unseeded():
    assert seeds(replicated(seeded(0, 0), kernel_programs.topology(2)).graph, 1) == (0, 0)


def random_in_a_branch():
    with tf.Graph().as_default() as graph:
        going = tf.compat.v1.placeholder_with_default(True, [], name="going")
        drawn = tf.cond(
            going,
            lambda: tf.cond(going, lambda: tf.random.uniform([4], seed=3), lambda: tf.zeros([4])),
            lambda: tf.ones([4]),
        )
        plain = tf.cond(going, lambda: tf.zeros([4]), lambda: tf.ones([4]))
        return kernel_programs.captured(graph, outputs=[drawn, plain])


def called(graph, name):
    """The functions called by the If whose result the op `name` passes on."""
    (conditional,) = node(graph, name).input
    return [function for _, function in functions_of(node(graph, op_of(conditional)))]


def reachable(graph, names):
    found, pending = {}, list(names)
    while pending:
        name = pending.pop()
        found[name] = graph.library[name]
        pending += [
            other for each in graph.library[name].node_def for _, other in functions_of(each) if other not in found
        ]
    return found


def drawing_seeds(graph, names):
    return [
        (each.attr["seed"].i, each.attr["seed2"].i)
        for function in reachable(graph, names).values()
        for each in function.node_def
        if each.op == "RandomUniform"
    ]


def test_library_functions_that_draw_are_cloned_for_every_replica_but_the_first():
    item = random_in_a_branch()
    program = kernel_programs.after("replicate", item, kernel_programs.topology(3))
    drawn, plain = (op_of(output.tensor) for output in item.outputs)
    original = called(GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def)), drawn)
    functions = [called(program.graph, on_replica(index, drawn)) for index in range(3)]
    assert functions[0] == original != []
    streams = [drawing_seeds(program.graph, names) for names in functions]
    assert [len(each) for each in streams] == [1, 1, 1]
    assert len({each[0] for each in streams}) == 3
    assert called(program.graph, on_replica(0, plain)) == called(program.graph, on_replica(2, plain)) != []


def test_functions_that_draw_alike_are_cloned_with_their_seeds():
    """The state of an op in a function is the function's, so each replica has its own."""
    item = random_in_a_branch()
    graph = tf.compat.v1.GraphDef.FromString(item.graph_def)
    drawn = op_of(item.outputs[0].tensor)
    (conditional,) = (op_of(name) for one in graph.node if one.name == drawn for name in one.input)
    (marked,) = (one for one in graph.node if one.name == conditional)
    marked.attr[DRAWN_ALIKE].b = True
    program = kernel_programs.after(
        "replicate", replace(item, graph_def=graph.SerializeToString()), kernel_programs.topology(3)
    )
    functions = [called(program.graph, on_replica(index, drawn)) for index in range(3)]
    drawing = [
        {
            name
            for name, one in reachable(program.graph, names).items()
            if any(n.op == "RandomUniform" for n in one.node_def)
        }
        for names in functions
    ]
    assert len(set.union(*drawing)) == 3, drawing
    (streams,) = {tuple(drawing_seeds(program.graph, names)) for names in functions}
    assert len(streams) == 1


def test_cloned_functions_run_and_draw_differently():
    item = random_in_a_branch()
    program = kernel_programs.after("replicate", item, kernel_programs.topology(2))
    graph = kernel_programs.import_graph(program.graph)
    names = [f"{on_replica(index, item.outputs[0].tensor)}" for index in (0, 1)]
    with kernel_programs.session(graph) as running:
        first, second = running.run([graph.get_tensor_by_name(name) for name in names])
    alone = kernel_programs.import_graph(GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def)))
    with kernel_programs.session(alone) as running:
        one_device = running.run(alone.get_tensor_by_name(item.outputs[0].tensor))
    np.testing.assert_array_equal(first, one_device)
    assert not np.array_equal(first, second)


def test_no_op_of_the_golden_program_is_left_out():
    item = kernel_programs.linear_regression()
    captured = tf.compat.v1.GraphDef.FromString(item.graph_def)
    program = kernel_programs.after("replicate", item, kernel_programs.topology(2))
    copies = [[op.name for op in program.graph.nodes.values() if replica_of(op.name) == index] for index in (0, 1)]
    assert copies == [
        [on_replica(index, op.name) for op in captured.node if op.op != "Placeholder"] for index in (0, 1)
    ]
