"""Edits of a graph, and the runner of passes."""

from dataclasses import replace
from typing import ClassVar

import pytest
import tensorflow as tf

from autodist_py.kernel.printer import format_graph
from autodist_py.kernel.rewrite import Edits, run_passes
from autodist_py.proto.errors import InvalidGraphError
from tests.kernel import programs
from tests.kernel.programs import parsed

GRAPH = parsed("a = Const()", "b = Const()", "c = AddV2(a, b)", "d = Mul(a, a, ^b)")


class Renaming:
    """A pass that leaves the program as it is."""

    name: ClassVar[str] = "nothing"

    def __call__(self, program):
        return program


class Editing:
    """A pass that edits the graph it is given."""

    name: ClassVar[str] = "impure"

    def __call__(self, program):
        program.graph.node[0].device = "/device:CPU:1"
        return program


class Losing:
    """A pass whose result lacks an op that others read."""

    name: ClassVar[str] = "lossy"

    def __call__(self, program):
        graph = tf.compat.v1.GraphDef()
        graph.CopyFrom(program.graph)
        del graph.node[0]
        return replace(program, graph=graph)


def lines(graph):
    return format_graph(graph).splitlines()


def test_edits_are_applied_together_and_the_graph_stays_as_it_was():
    before = GRAPH.SerializeToString(deterministic=True)
    edits = Edits()
    edits.set_input("c", 1, "new")
    edits.redirect("d", "a", "c")
    edits.add_control("d", "c")
    edits.set_device("a", "/device:CPU:0")
    edits.add(parsed("new = Neg(a)").node)
    edits.set_device("new", "/device:CPU:1")
    assert lines(edits.apply(GRAPH)) == [
        "a = Const() @/device:CPU:0",
        "b = Const()",
        "new = Neg(a) @/device:CPU:1",
        "c = AddV2(a, new)",
        "d = Mul(c, c, ^b, ^c)",
    ]
    assert GRAPH.SerializeToString(deterministic=True) == before


def test_a_redirection_holds_for_the_op_it_names_only():
    edits = Edits()
    edits.redirect("c", "a", "b")
    assert lines(edits.apply(GRAPH))[2:] == ["c = AddV2(b, b)", "d = Mul(a, a, ^b)"]


def test_the_library_and_versions_of_a_graph_survive_edits():
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(GRAPH)
    graph.versions.producer = 7
    graph.library.function.add().signature.name = "f"
    edited = Edits().apply(graph)
    assert edited == graph
    assert edited is not graph


def test_a_pass_that_edits_its_input_is_named_with_those_before_it():
    with pytest.raises(InvalidGraphError, match="must not edit") as raised:
        run_passes(programs.program_of(parsed("a = Const()"), programs.place(1)), [Renaming(), Editing()])
    assert raised.value.__notes__ == ["in pass 'impure', after nothing"]


def test_a_pass_that_leaves_an_invalid_graph_is_named():
    with pytest.raises(InvalidGraphError, match="'a' is no op of the graph") as raised:
        run_passes(programs.program_of(parsed("a = Const()", "b = Neg(a)"), programs.place(1)), [Losing()])
    assert raised.value.__notes__ == ["in pass 'lossy', after no other pass"]


def test_observers_see_the_program_after_each_pass_in_order():
    seen = []
    program = programs.program_of(parsed("a = Const()"), programs.place(1))
    result = run_passes(program, [Renaming(), Renaming()], [lambda *event: seen.append(event)])
    assert seen == [(1, "nothing", program), (2, "nothing", program)]
    assert result is program
