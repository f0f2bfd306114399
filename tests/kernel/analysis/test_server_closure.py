"""What one server holds, runs and is sent, and for which reads it waits, each found alone."""

import pytest

from autodist_py.kernel.analysis.server_closure import Closure, Holding
from autodist_py.kernel.analysis.server_reads import Reads
from autodist_py.kernel.analysis.server_split import WORKERS, Division
from autodist_py.kernel.program import Program
from autodist_py.proto.graph_item import GraphItem
from tests.support import kernel_programs


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
    ("worker_ops", "before"),
    [({"v0/Read"}, {"update_0": {"v0/Read"}}), ({"v1/Read"}, {}), (set(), {})],
    ids=["of-its-variable", "of-another", "none"],
)
def test_a_server_waits_for_what_workers_read_of_its_variable_before_the_write(worker_ops, before):
    program, division = divided(kernel_programs.two_stages(), 0, 1)
    reads = Reads.of(
        program, division, Holding.of(division, 0), mirrored_ops=(), worker_ops=worker_ops, late=worker_ops
    )
    assert (reads.before, reads.recounted) == (before, {})
