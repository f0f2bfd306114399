"""What workers read of variables before a server writes these: early reads, and late ones, after another server."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import networkx as nx

from autodist_py.kernel.analysis.server_closure import Holding, writers_of
from autodist_py.kernel.analysis.server_split import Division
from autodist_py.kernel.ir.graph import PASSES_HANDLE, GraphView
from autodist_py.kernel.program import Program
from autodist_py.proto.errors import StrategyError


@dataclass(frozen=True, slots=True)
class Reads:
    """What workers read of variables after a server has written, and before it writes these.

    Attributes:
        before: for each op that writes what the server holds, what workers read of that before, after something
            that a server does: it writes in an exchange that they begin when they have read.
        recounted: of the server's mirrored ops those that write what is written several times, or read before by
            what waits for a server; each with the variable.
    """

    before: Mapping[str, frozenset[str]]
    recounted: Mapping[str, str]

    @classmethod
    def of(
        cls, program: Program, division: Division, own: Holding, *, mirrored_ops: Collection[str], late: set[str]
    ) -> "Reads":
        """Those of one server.

        Args:
            program: the captured one.
            division: which ops servers run.
            own: what the server holds.
            mirrored_ops: see ServerPlan.
            late: the ops that workers run and that wait for a server.

        Raises:
            StrategyError: a variable is read between two of its writes, and workers take their steps by themselves, so
                that others' writes come between, too.
        """
        view, writes = program.analysis.captured, writers_of(program)
        if not program.strategy.consistency.is_bsp:
            for handle in sorted(own.held):
                if users := division.users(handle) & late:
                    _require_not_between(view, handle, writes[handle], users)
            return cls({}, _recounted(program, division, mirrored_ops, set()))
        recounted = _recounted(program, division, mirrored_ops, late)
        before: dict[str, frozenset[str]] = {}
        for handle in sorted(own.held.union(recounted.values())):
            users = division.users(handle) & late
            for writer in writes[handle] if users else ():
                ahead: set[str] = nx.ancestors(view.digraph, writer)
                before[writer] = before.get(writer, frozenset()) | (users & ahead)
        return cls(before, recounted)


def early_reads(
    program: Program, division: Division, ops: Collection[str], readers: Collection[str]
) -> Iterator[tuple[str, str]]:
    """What of `readers` uses a variable that some of `ops` write, and these wait for; after the variable."""
    view = program.analysis.captured
    for handle, writers in writers_of(program).items():
        own = writers.intersection(ops)
        users = division.users(handle).intersection(readers) - writers if own else set[str]()
        for op in sorted(users & view.ancestors(own) if users else users):
            if view.nodes[op].op not in PASSES_HANDLE:
                yield handle, op


def _recounted(program: Program, division: Division, mirrored_ops: Collection[str], late: set[str]) -> dict[str, str]:
    """The mirrored ops that write what is written several times or read before by one of `late`; with the variable."""
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
