"""`Agreement`: what the workers of one AutoDist object must have in common before they run a program together."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist_py.capture.canonical import canonical
from autodist_py.cluster.cluster import Cluster
from autodist_py.cluster.server_probe import STILL_SECONDS
from autodist_py.kernel.ir.dataflow import PYTHON_OPS
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.pipeline import CompiledProgram
from autodist_py.kernel.printer import format_graph
from autodist_py.proto.errors import AutoDistError, CaptureError, ClusterError, WorkerFailedError
from autodist_py.proto.graph_item import GraphItem

_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_WRITES_SECONDS = 60.0 + STILL_SECONDS
"""How long workers that wrote variables wait for others to write them, too: the Python of one may stand still."""


class Agreement:
    """Compares what the workers have, and tells them what the chief has. Every worker makes the same calls."""

    def __init__(self, cluster: Cluster, name: str):
        """The workers of the AutoDist object of that name."""
        self._cluster, self._name = cluster, name
        self._next = 0

    def key(self, what: str) -> str:
        """A key for something that all workers do together: the same on all, and of nothing else."""
        self._next += 1
        return f"{self._name}/{self._next}/{what}"

    def chiefs(self, what: str, value: str) -> str:
        """The chief's `value`. It is asked for in each program: what others would make of theirs may differ."""
        return self._cluster.broadcast(self.key(what), value.encode()).decode()

    def require_same_graph(self, item: GraphItem) -> None:
        """Raises CaptureError: this worker's graph is not the chief's; the message shows where."""
        if self._cluster.num_workers == 1:
            return
        fingerprint = run_together(item).fingerprint
        own = f"{fingerprint} {self._cluster.step}"
        everyone = {
            rank: value.decode().split()
            for rank, value in self._cluster.compare(self.key("fingerprint"), own.encode()).items()
        }
        self._count_alike(int(step) for _, step in everyone.values())
        graphs = {rank: graph for rank, (graph, _) in everyone.items()}
        if len(set(graphs.values())) == 1:
            return
        texts = self._cluster.compare(self.key("graph"), _item_text(run_together(item)).encode())
        different = sorted(rank for rank, graph in graphs.items() if graph != graphs[0])
        raise CaptureError(
            f"the script must build the same graph on every worker, but {_workers(different)} another than the chief: "
            f"{_first_difference(texts[0].decode(), texts[different[0]].decode())}. Look for code that depends on the "
            "rank, the host, the time, the order of a set, or random numbers"
        )

    def _count_alike(self, steps: Iterable[int]) -> None:
        """All workers are here, whatever number of steps each took by itself: they go on from the largest.

        What the chief announces is found by the number of the step at which scripts stand.
        """
        most = max(steps)
        if self._cluster.step < most:
            self._cluster.step = most

    def require_same_writes(self, written: Collection[str]) -> None:
        """Raises ClusterError: the workers did not all write these variables since the last step."""
        rule = "every worker must run the same initializers, assignments and restores before a step"
        names = "\n".join(written)
        try:
            everyone = self._cluster.compare(self.key("written"), names.encode(), timeout=_WRITES_SECONDS)
        except WorkerFailedError:
            raise
        except ClusterError as error:
            raise ClusterError(
                f"{rule}; worker {self._cluster.rank} wrote {', '.join(written)}, and others did not"
            ) from error
        if len(set(everyone.values())) > 1:
            raise ClusterError(f"{rule}: {_first_difference(everyone[0].decode(), names)}")

    def require_same_schedule(self, program: CompiledProgram) -> None:
        """Raises AutoDistError: another worker's events are not the chief's."""
        if self._cluster.num_workers == 1:
            return
        require_same_schedule(self._cluster.compare(self.key("schedule"), lowered_text(program).encode()))

    def may_go_everywhere(self, may_go: bool) -> bool:
        """Whether all workers may let a program go: they let go of the same ones, and compile those anew together."""
        if self._cluster.num_workers == 1:
            return may_go
        everyone = self._cluster.compare(self.key("may_go"), b"yes" if may_go else b"no")
        return all(said == b"yes" for said in everyone.values())


def run_together(item: GraphItem) -> GraphItem:
    """What of an item must be the same on every worker.

    Not what one of them may run alone, such as a chief's saver, nor in which file the lines of its code stand. Random
    names (UUIDs, as TensorFlow gives lookup tables and some functions) are numbered as they come: each is a process's.
    So is the name of Python code, which TensorFlow counts, also that of a generator which the chief alone reads.
    """
    numbers: dict[bytes, bytes] = {}

    def numbered(found: re.Match[bytes]) -> bytes:  # As long as it was, so that the message stays one.
        return numbers.setdefault(found[0], b"%036d" % len(numbers))

    graph_def = _without_tokens(_UUID.sub(numbered, item.graph_def))
    return replace(item, graph_def=graph_def, savers=(), table_initializers=(), mixtures=())


def _without_tokens(content: bytes) -> bytes:
    """A graph without the names of its Python code, by which the functions that have some are named, too."""
    graph = tf.compat.v1.GraphDef.FromString(content)
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    of_python = [node for node in nodes if node.op in PYTHON_OPS]
    if not of_python:
        return content
    for node in of_python:
        node.attr["token"].s = b""
    return canonical(graph, {node.name for node in graph.node}).SerializeToString(deterministic=True)


def lowered_text(program: CompiledProgram) -> str:
    """What all workers must agree on: the schedule, and what it was lowered to, which depends on the graph, too."""
    lowered = [(one, sorted({_carried(program.graph.nodes[op]) for op in one.ops})) for one in program.collectives]
    lines = [f"{one.what}: {', '.join(carried)}" for one, carried in lowered]
    first = (f"'{one}' is computed before '{other}'" for one, other in program.schedule.computed_first)
    return "\n".join([*map(str, program.schedule.events), *lines, *first])


def _carried(collective: tf.compat.v1.NodeDef) -> str:
    return f"{collective.op} of {tf.as_dtype(collective.attr['T'].type).name}"


def require_same_schedule(everyone: Mapping[int, bytes]) -> None:
    """Refuse programs whose schedules do not match: they would wait for each other for ever.

    Args:
        everyone: `lowered_text` of each worker, by rank.

    Raises:
        AutoDistError: the first event or collective that differs, and between which workers.
    """
    for rank, text in sorted(everyone.items()):
        if text != everyone[0]:
            raise AutoDistError(
                f"the collectives of worker {rank} are not the chief's, so that the workers would wait for each other "
                f"for ever: {_first_difference(everyone[0].decode(), text.decode())}"
            )


def _item_text(item: GraphItem) -> str:
    """The item for a comparison: first what a person reads, then every detail; without the fingerprint."""
    graph = tf.compat.v1.GraphDef.FromString(item.graph_def)
    return "\n".join([format_graph(GraphView(graph)), str(item).partition("\n")[2], str(graph)])


def _first_difference(theirs: str, ours: str) -> str:
    lines = difflib.unified_diff(theirs.splitlines(), ours.splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    removed = next((line[1:] for line in changed if line.startswith("-")), "nothing")
    added = next((line[1:] for line in changed if line.startswith("+")), "nothing")
    return f"the chief has `{removed.strip()}` where the other has `{added.strip()}`"


def _workers(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]} builds"
    return f"workers {', '.join(map(str, ranks))} build"
