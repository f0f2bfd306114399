"""Edits of a graph, and the runner of passes."""

from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.pipeline import PASSES
from autodist_py.kernel.printer import format_graph
from autodist_py.kernel.program import Invariant
from autodist_py.kernel.runner import Contract, run_passes
from autodist_py.proto.errors import InvalidGraphError
from tests.support import kernel_programs
from tests.support.kernel_programs import parsed

GRAPH = GraphView(parsed("a = Const()", "b = Const()", "c = AddV2(a, b)", "d = Mul(a, a, ^b)"))


class Renaming:
    """A pass that leaves the program as it is."""

    name: ClassVar[str] = "nothing"
    contract: ClassVar[Contract] = Contract()

    def __call__(self, program):
        return program


class Losing:
    """A pass whose result lacks an op that others read."""

    name: ClassVar[str] = "lossy"
    contract: ClassVar[Contract] = Contract(ends=frozenset({Invariant.CAPTURED}))

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


def test_a_redirection_of_all_holds_for_what_is_new_and_what_was_put_too():
    edits = Edits()
    edits.redirect_all("a", "b")
    edits.add(parsed("new = Neg(a)").node)
    edits.put(parsed("c = Sub(a, b)").node[0])
    edits.add_control("c", "new")
    assert lines(edits.apply(GRAPH))[2:] == ["new = Neg(b)", "c = Sub(b, b, ^new)", "d = Mul(b, b, ^b)"]


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
@pytest.mark.parametrize(
    "where", [kernel_programs.topology(2), kernel_programs.topology(1, 1), kernel_programs.topology(2, 1, worker=1)]
)
def test_no_pass_edits_the_graph_it_is_given(name, where):
    program = kernel_programs.started(getattr(kernel_programs, name)(), where)
    for step in PASSES:
        before = program.graph.graph_def()
        result = step(program)
        assert program.graph.graph_def() == before, step.name
        program = result


def test_a_pass_that_leaves_an_invalid_graph_is_named():
    with pytest.raises(InvalidGraphError, match="'a' is no op of the graph") as raised:
        run_passes(
            kernel_programs.program_of(parsed("a = Const()", "b = Neg(a)"), kernel_programs.topology(1)), [Losing()]
        )
    assert raised.value.__notes__ == ["in pass 'lossy', after no other pass"]


def test_observers_see_the_program_after_each_pass_in_order():
    seen = []
    program = kernel_programs.program_of(parsed("a = Const()"), kernel_programs.topology(1))
    result = run_passes(program, [Renaming(), Renaming()], [lambda *event: seen.append(event)])
    assert seen == [(1, "nothing", program), (2, "nothing", program)]
    assert result == program


# -- Contracts --------------------------------------------------------------------------------------------------------


def order_of(passes):
    """The passes' names if their contracts let them run one after the other; else None."""
    holds = {Invariant.CAPTURED}
    for step in passes:
        if step.contract.requires - holds:
            return None
        holds = (holds - step.contract.ends) | step.contract.ensures
    return [step.name for step in passes]


def swapped(first):
    passes = list(PASSES)
    passes[first : first + 2] = passes[first + 1], passes[first]
    return passes


def test_the_passes_stand_in_an_order_that_their_contracts_allow():
    assert order_of(PASSES) == [step.name for step in PASSES]


FREE = [("unbranch", "look-up"), ("look-up", "partition"), ("refresh", "read-data"), ("place", "order")]
"""Neighbours in PASSES whose contracts leave their order open; of this program, which has no cut variable, it is."""


@pytest.mark.parametrize("first", range(len(PASSES) - 1), ids=lambda first: PASSES[first].name)
def test_of_two_passes_the_later_one_is_refused_before_the_one_that_it_needs(first):
    passes = swapped(first)
    program = kernel_programs.started(kernel_programs.dense_and_sparse(), kernel_programs.topology(2, 1))
    if (PASSES[first].name, PASSES[first + 1].name) in FREE:
        result, usual = run_passes(program, passes), run_passes(program, PASSES)
        assert (result.holds, result.graph.nodes.keys()) == (usual.holds, usual.graph.nodes.keys())
        assert str(result.schedule) == str(usual.schedule)
    else:
        assert order_of(passes) is None
        with pytest.raises(
            InvalidGraphError, match=f"pass '{PASSES[first + 1].name}' requires what does not hold here"
        ):
            run_passes(program, passes)


@given(st.permutations(PASSES))
@settings(max_examples=300, deadline=None)
def test_in_no_order_is_a_pass_given_what_it_does_not_take(passes):
    """An order is allowed if, and only if, each pass stands behind those whose work it needs."""
    needed = {
        step.name: {other.name for other in PASSES if other.contract.ensures & step.contract.requires}
        for step in PASSES
    }
    names = [step.name for step in passes]
    replicate = names.index("replicate")
    are_behind = all(needed[name] <= set(names[:index]) for index, name in enumerate(names))
    of_captured = {step.name for step in PASSES if Invariant.CAPTURED in step.contract.requires}
    assert (order_of(passes) is not None) == (are_behind and of_captured <= set(names[: replicate + 1]))


def test_every_invariant_is_ensured_by_one_pass_and_has_a_check():
    ensured = [one for step in PASSES for one in step.contract.ensures]
    assert sorted(one.name for one in (*ensured, Invariant.CAPTURED)) == sorted(one.name for one in Invariant)


def test_a_pass_that_does_not_do_what_it_says_is_named():
    class Claiming:
        name: ClassVar[str] = "claims"
        contract: ClassVar[Contract] = Contract(ensures={Invariant.PLACED})

        def __call__(self, program):
            return program

    program = kernel_programs.program_of(parsed("a = Const()"), kernel_programs.topology(1))
    with pytest.raises(InvalidGraphError, match="an op has no device: a = Const") as raised:
        run_passes(program, [Claiming()])
    assert raised.value.__notes__ == ["in pass 'claims', after no other pass"]
