"""What workers read of variables after a server has written, and before it writes these: it waits for such reads."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import networkx as nx

from autodist_py.kernel.analysis.server_closure import Holding, writers_of
from autodist_py.kernel.analysis.server_split import Division
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.program import Program
from autodist_py.proto.errors import StrategyError


@dataclass(frozen=True, slots=True)
class Reads:
    """What workers read of variables after a server has written, and before it writes these.

    Attributes:
        before: for each op that the server runs to write a variable, what workers read of that variable before it: they
            send their message when they have read. It says so of variables that the server's own worker keeps, too.
        recounted: of the server's `counted` ops those that write what is written several times, or read before by
            what waits for a server; each with the variable.
    """

    before: Mapping[str, frozenset[str]]
    recounted: Mapping[str, str]

    @classmethod
    def of(
        cls,
        program: Program,
        division: Division,
        own: Holding,
        *,
        mirrored_ops: Collection[str],
        worker_ops: Collection[str],
        late: set[str],
    ) -> "Reads":
        """Those of one server.

        Args:
            program: the captured one.
            division: which ops servers run.
            own: what the server holds.
            mirrored_ops: see ServerPlan.
            worker_ops: the ops that workers run.
            late: those of them that wait for a server.

        Raises:
            StrategyError: a variable is read between two of its writes, and workers take their steps by themselves, so
                that others' writes come between, too.
        """
        view, writes = program.analysis.captured, writers_of(program)
        is_bsp = program.strategy.consistency.is_bsp
        for handle in () if is_bsp else sorted(own.held):
            if users := division.users(handle) & late:
                _require_not_between(view, handle, writes[handle], users)
        mirrored = {handle for handle, writers in writes.items() if not writers.isdisjoint(mirrored_ops)}
        before: dict[str, frozenset[str]] = {}
        for handle in sorted(own.held | mirrored):
            users = division.users(handle).intersection(worker_ops) - writes[handle]
            for writer in writes[handle] if users else ():
                ahead: set[str] = nx.ancestors(view.digraph, writer)
                before[writer] = before.get(writer, frozenset()) | (users & ahead)
        return cls(before, _recounted(program, division, mirrored_ops, late if is_bsp else set()))


def _recounted(program: Program, division: Division, mirrored_ops: Collection[str], late: set[str]) -> dict[str, str]:
    """The `counted` ops that write what is written several times or read before by one of `late`; with the variable."""
    graph = program.analysis.captured.digraph
    found: dict[str, str] = {}
    for handle, writers in writers_of(program).items():
        again, users = writers.intersection(mirrored_ops), division.users(handle) & late
        before: set[str] = set().union(*(nx.ancestors(graph, writer) for writer in again))
        if len(writers) > 1 or users & before:
            found |= dict.fromkeys(again, handle)
    return found


def _require_not_between(view: GraphView, handle: str, writers: set[str], users: set[str]) -> None:
    """Refuse that one of the users reads the variable between two of its writes."""
    before: set[str] = set().union(*(nx.ancestors(view.digraph, writer) for writer in writers))
    for op in sorted(users & before):
        behind: set[str] = nx.ancestors(view.digraph, op)
        if writers & behind:
            raise StrategyError(
                f"'{op}' reads variable '{handle}' between two of its writes in a step, and with sync=False, a "
                "staleness or replicas_to_aggregate, writes of other workers come between. Read it before or "
                "after the update, or leave these options out"
            )
