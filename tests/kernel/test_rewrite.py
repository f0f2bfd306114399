"""Edits of a graph, and the runner of passes."""

from dataclasses import replace
from typing import ClassVar

import pytest

from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.pipeline import PASSES
from autodist_py.kernel.printer import format_graph
from autodist_py.kernel.rewrite import Edits, run_passes
from autodist_py.proto.errors import InvalidGraphError
from tests.kernel import programs
from tests.kernel.programs import parsed

GRAPH = GraphView(parsed("a = Const()", "b = Const()", "c = AddV2(a, b)", "d = Mul(a, a, ^b)"))


class Renaming:
    """A pass that leaves the program as it is."""

    name: ClassVar[str] = "nothing"

    def __call__(self, program):
        return program


class Losing:
    """A pass whose result lacks an op that others read."""

    name: ClassVar[str] = "lossy"

    def __call__(self, program):
        kept = list(program.graph.nodes.values())[1:]
        return replace(program, graph=program.graph.made_of(kept, ()))


def lines(graph):
    return format_graph(graph).splitlines()


def test_edits_are_applied_together_and_the_graph_stays_as_it_was():
    before = GRAPH.graph_def()
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
    assert GRAPH.graph_def() == before


def test_a_redirection_holds_for_the_op_it_names_only():
    edits = Edits()
    edits.redirect("c", "a", "b")
    assert lines(edits.apply(GRAPH))[2:] == ["c = AddV2(b, b)", "d = Mul(a, a, ^b)"]


def test_the_library_and_versions_of_a_graph_survive_edits():
    graph = GRAPH.graph_def()
    graph.versions.producer = 7
    graph.library.function.add().signature.name = "f"
    assert Edits().apply(GraphView(graph)).graph_def() == graph


def test_an_edit_of_an_op_that_is_not_there():
    edits = Edits()
    edits.set_device("gone", "/device:CPU:0")
    with pytest.raises(InvalidGraphError, match="'gone' is to be edited, but is no op of the graph"):
        edits.apply(GRAPH)


def test_an_added_op_with_the_name_of_another():
    edits = Edits()
    edits.add(parsed("a = Neg(b)").node)
    with pytest.raises(InvalidGraphError, match="two ops have the name 'a': Const and Neg"):
        edits.apply(GRAPH)


@pytest.mark.parametrize("name", ["linear_regression", "two_stages", "dense_and_sparse"])
@pytest.mark.parametrize("where", [programs.place(2), programs.place(1, 1), programs.place(2, 1, worker=1)])
def test_no_pass_edits_the_graph_it_is_given(name, where):
    program = programs.started(getattr(programs, name)(), where)
    for step in PASSES:
        before = program.graph.graph_def()
        result = step(program)
        assert program.graph.graph_def() == before, step.name
        program = result


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
