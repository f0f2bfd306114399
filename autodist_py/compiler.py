"""From a captured step to a program that runs on this worker: what all doors do after capture.

It owns the order of things between the workers: the same graph everywhere, the chief's strategy and initial values.
It is long, as each of these steps is what the next one agrees on with other workers.
"""

import difflib
import logging
import re
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import tensorflow as tf

from autodist_py.capture.canonical import canonical
from autodist_py.engines import Engine, automatic_engine, with_engine
from autodist_py.kernel.analysis import PYTHON_OPS, using, writes_of_own_part
from autodist_py.kernel.device import Place, resolve
from autodist_py.kernel.graph_view import ITERATOR_NEXT, GraphView
from autodist_py.kernel.own_state import own_state
from autodist_py.kernel.pipeline import CompiledProgram, compile
from autodist_py.kernel.printer import format_graph
from autodist_py.kernel.program import Options
from autodist_py.kernel.rewrite import Observer
from autodist_py.plan import inexact
from autodist_py.programs import AloneProgram, StepProgram
from autodist_py.proto.errors import AutoDistError, CaptureError, ClusterError, WorkerFailedError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy
from autodist_py.proto.strategy_pb2 import Strategy as StrategyMessage
from autodist_py.runtime import horovod
from autodist_py.runtime.cluster import Cluster
from autodist_py.runtime.copies import Copies
from autodist_py.runtime.executor import Executor
from autodist_py.runtime.initial_values import broadcast
from autodist_py.runtime.input_check import InputCheck
from autodist_py.runtime.kept import Kept
from autodist_py.runtime.liveness import STILL_SECONDS
from autodist_py.runtime.memories import Memories
from autodist_py.served import Served
from autodist_py.step_times import StepTimes
from autodist_py.strategy_builders.base import StrategyBuilder, build_strategy
from autodist_py.timeline import Timeline

_log = logging.getLogger(__name__)

_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_WRITES_SECONDS = 60.0 + STILL_SECONDS
"""How long workers that wrote variables wait for others to write them, too: the Python of one may stand still."""


class Compiler:
    """Makes programs for one AutoDist object."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        resources: ResourceSpec,
        builder: StrategyBuilder,
        options: Options,
        observers: Sequence[Observer] = (),
        checked_steps: int = 0,
        timeline: Path | None = None,
    ):
        self.cluster = cluster
        self._copies = Copies()
        self._name = name
        self._resources = resources
        self._builder = builder
        self._options = options
        self._observers = observers
        self._checked_steps = checked_steps if options.batch == "global" else 0
        self._broadcast: Kept[None] = Kept()  # the variables whose values are the chief's
        self._next_agreement = 0
        self.served = Served(cluster, self._key, resources.server_devices)
        """The variables that live on servers."""
        self.memories = Memories()
        self._told: set[tuple[str, str]] = set()
        key = f"{name}/timeline"
        self._timeline = Timeline(timeline, cluster, key=key, pause=self.served.pause) if timeline else None

    def strategy(self, item: GraphItem) -> Strategy:
        """The strategy that the chief builds for `item`, on every worker.

        Raises:
            CaptureError: this worker's graph differs from the chief's; the message shows where.
            StrategyError: the builder cannot serve this graph or cluster.
        """
        self.served.pause()
        self._require_same_graph(item)
        message = b""
        if self.cluster.is_chief:
            message = build_strategy(self._builder, item, self._resources).to_proto().SerializeToString()
        agreed = self.cluster.agree(self._key("strategy"), message)
        return Strategy.from_proto(StrategyMessage.FromString(agreed), is_own=True)

    def distributed(
        self,
        item: GraphItem,
        strategy: Strategy,
        variables: Mapping[str, tf.Variable],
        state: Mapping[str, tf.Tensor],
        *,
        name: str,
        namespace: str = "",
        examples: int | None = None,
        own: Collection[str] = (),
        may_go: bool = True,
    ) -> StepProgram:
        """A program that all workers run together.

        Args:
            item: what was captured.
            strategy: how its variables are synchronized.
            variables: the user's variables, by their names in `item`.
            state: the tensors for its "state" inputs.
            name: what the program is called in profiles and causes of failure.
            namespace: see Executor.
            examples: how many this worker is given in the step that is compiled for; None: not known.
            own: names of inputs that are each worker's own, and not compared.
            may_go: whether this worker could let the program go; it may if all could.
        """
        begin = time.perf_counter()
        strategy = self.served.at_home(strategy, variables)
        place = resolve(strategy.replicas, self._resources, worker=self.cluster.rank)
        if place.num_replicas > 1 and self._options.refuses_mixtures:
            require_no_mixture(item, name)
        if place.num_replicas > 1 and self.cluster.is_chief:
            self._warn(name, inexact(item))
        self.broadcast_initial_values(variables)
        chosen = self._with_engine_started(item, strategy, name)
        options = replace(
            self._options,
            first_instance_key=self.cluster.next_instance_key,
            channel=f"{self.cluster.run_id}/{self._key('channel')}",
            examples=int(self._chiefs("examples", str(examples or 0))) or None,
        )
        program = compile(item, chosen, place, options, observers=self._observers)
        self.cluster.next_instance_key = program.next_instance_key
        self._require_same_launches(program)
        fed = [source.name for source in item.inputs if source.kind == "feed"]
        checked_steps = self._checked_steps if program.pace.is_together else 0
        check = InputCheck(self.cluster, self._key("inputs"), fed, own=own, steps=checked_steps)
        if self.cluster.is_chief:
            self._warn(name, self._otherwise(program, strategy))
        own = {**variables, **self.memories.of(program.memories, variables, self.cluster.num_workers)}
        shards = self.served.hold(program, strategy, own)
        executor = self._executor(program, {**variables, **shards}, state, name, namespace)
        messages = self.served.serve(program, executor.server_function)
        step = StepProgram(
            executor,
            self.cluster,
            check,
            self.served.copies(program, own),
            messages,
            launches=program.launches,
            timeout=strategy.timeout_seconds,
            timeline=self._timeline if program.pace.is_together else None,
            times=self._times(program, name),
            may_go=self._may_go_everywhere(may_go and program.pace.is_together and not own_state(item)),
        )
        if messages is not None and program.pace.is_together:
            weakref.finalize(step, messages.close)
        _log.info(
            "%s: compiled in %.1f s for %d replicas on %d workers: %d variables, %d of them on servers or in shards, "
            "%d collectives a step",
            name,
            time.perf_counter() - begin,
            place.num_replicas,
            self.cluster.num_workers,
            len(item.variables),
            len(program.held),
            len(program.launches),
        )
        return step

    def alone(
        self,
        item: GraphItem,
        variables: Mapping[str, tf.Variable],
        state: Mapping[str, tf.Tensor],
        *,
        name: str,
        namespace: str = "",
        may_go: bool = True,
    ) -> AloneProgram:
        """A program without the step's update, that this worker runs by itself on the whole of what it is given.

        No other worker takes part, nor is asked. One device runs it where nothing is batched, so that there is nothing
        to share out, and where it writes state.

        Raises:
            CaptureError: it writes state from this worker's own part of the batch, which the others do not see.
        """
        written = {v.name: variables[v.name] for v in item.variables if v.update_ops}
        if self._options.batch == "local" and self.cluster.num_workers > 1:
            # Nobody else takes part, so nothing is combined.
            for variable, writer in writes_of_own_part(item):
                raise CaptureError(
                    f"variable '{variable}' is written by '{writer}' with what depends on this worker's own part of "
                    'the batch (batch="local"), in a run that each worker does by itself, so that it would differ '
                    "between workers. Write it in the training step, or not at all"
                )
        everywhere = Strategy(node_config=(), replicas=self._resources.replica_devices)
        place = self.place(everywhere).alone()
        if written or not any(source.batched for source in item.inputs):
            place = Place(place.worker, place.replicas[:1])
        program = compile(item, everywhere, place, self._options, observers=self._observers)
        return AloneProgram(
            self._executor(program, variables, state, name, namespace),
            variables,
            written,
            self.served.homes,
            self.written_alone,
            may_go=may_go and not own_state(item),
        )

    def place(self, strategy: Strategy) -> Place:
        """Where this worker stands among the strategy's replicas."""
        return resolve(strategy.replicas, self._resources, worker=self.cluster.rank)

    def written_alone(self, variables: Mapping[str, tf.Variable]) -> None:
        """This worker wrote these variables by itself; from the next step on the chief's values count again.

        Every worker must do the same writes before that step; `broadcast_initial_values` sees to it.
        """
        for variable in variables.values():
            self._broadcast.discard(variable)
            self.served.homes.written_here(variable)

    def broadcast_initial_values(self, variables: Mapping[str, tf.Variable]) -> None:
        """Make the variables that were not yet the chief's equal to them, on every worker.

        Raises:
            ClusterError: the workers did not all write the same variables.
        """
        new = {name: variable for name, variable in variables.items() if variable not in self._broadcast}
        if not new:
            return
        for variable in new.values():
            self._broadcast[variable] = None
        if self.cluster.num_workers > 1:
            self.served.pause()
            self._require_same_writes(new)
            self.served.homes.pull(new.values())
            self.served.homes.keep(new.values())
            broadcast(new, self.cluster)

    def _require_same_writes(self, new: Mapping[str, tf.Variable]) -> None:
        rule = "every worker must run the same initializers, assignments and restores before a step"
        names = "\n".join(new)
        try:
            everyone = self.cluster.compare(self._key("written"), names.encode(), timeout=_WRITES_SECONDS)
        except WorkerFailedError:
            raise
        except ClusterError as error:
            raise ClusterError(
                f"{rule}; worker {self.cluster.rank} wrote {', '.join(new)}, and others did not"
            ) from error
        if len(set(everyone.values())) > 1:
            raise ClusterError(f"{rule}: {_first_difference(everyone[0].decode(), names)}")

    def close(self) -> None:
        """Let go of what is kept about the user's variables, and end what serves them."""
        if self._timeline is not None:
            self._timeline.close()
        self.served.close()
        self._copies.clear()
        self._broadcast.clear()

    def _with_engine_started(self, item: GraphItem, strategy: Strategy, name: str) -> Strategy:
        """`strategy`, with the engine that AUTO stands for in its place: on all workers the same.

        Horovod is started for it, if need be. Where that cannot be, AUTO stands for RING.

        Raises:
            StrategyError, ClusterError: Horovod is asked for by its name, and a worker has no use of it.
        """
        engine = cast(Engine, self._chiefs("engine", automatic_engine(item, strategy, self._resources)))
        chosen = with_engine(strategy, item, engine)
        if self.cluster.num_workers == 1 or not horovod.is_asked_for(chosen):
            return chosen
        obstacle = horovod.obstacle(self.cluster, self._resources, self._key)
        if obstacle is None:
            horovod.start(self.cluster, self._resources, self._key)
            return chosen
        if horovod.is_asked_for(strategy):
            raise obstacle
        _log.info("%s: all_reduce_spec AUTO stands for RING, without Horovod: %s", name, obstacle)
        return strategy

    def _executor(
        self,
        program: CompiledProgram,
        variables: Mapping[str, tf.Variable],
        state: Mapping[str, tf.Tensor],
        name: str,
        namespace: str,
    ) -> Executor:
        copies = {(name, 0): variable for name, variable in variables.items()}
        for bound in program.variables:
            if bound.replica:
                own = variables[bound.variable]
                copies[bound.variable, bound.replica] = self._copies.of(own, bound.replica, bound.device)
        return Executor(program, copies, state, name=name.replace("/", "_"), namespace=namespace)

    def _otherwise(self, program: CompiledProgram, strategy: Strategy) -> Iterator[str]:
        """What of the program is not as it was asked for, in sentences for the user."""
        if self._timeline is not None and not program.pace.is_together:
            yield "a timeline is of steps that workers take together; there is none of this program"
        if self._timeline is not None and any(launch.by_name for launch in program.launches):
            yield (
                "TensorFlow's profiler does not see Horovod's all-reduces, so the timeline is without them; RING's are "
                "there, with all_reduce_spec RING"
            )
        yield from strategy.replaced
        for variable, reason in program.left_whole.items():
            yield f"'{variable}' is trained whole: {reason}"

    def _times(self, program: CompiledProgram, name: str) -> StepTimes | None:
        """What measures the chief's steps of a program that trains, where all workers take them together."""
        is_measured = self.cluster.is_chief and self.cluster.num_workers > 1 and self._timeline is None
        if using(program.graph, ITERATOR_NEXT | PYTHON_OPS):
            return None  # It waits for its input, too, as one device would.
        if not (is_measured and program.pace.is_together and program.item.gradients):
            return None
        return StepTimes(self.cluster.num_workers, lambda line: _log.warning("%s: %s", name, line))

    def _chiefs(self, what: str, value: str) -> str:
        """The chief's `value`. It is asked for in each program: what others would make of theirs may differ."""
        return self.cluster.agree(self._key(what), value.encode()).decode()

    def _require_same_graph(self, item: GraphItem) -> None:
        if self.cluster.num_workers == 1:
            return
        fingerprint = run_together(item).fingerprint.encode()
        everyone = self.cluster.compare(self._key("fingerprint"), fingerprint)
        if len(set(everyone.values())) == 1:
            return
        texts = self.cluster.compare(self._key("graph"), _item_text(run_together(item)).encode())
        different = sorted(rank for rank, value in everyone.items() if value != everyone[0])
        raise CaptureError(
            f"the script must build the same graph on every worker, but {_workers(different)} another than the chief: "
            f"{_first_difference(texts[0].decode(), texts[different[0]].decode())}. Look for code that depends on the "
            "rank, the host, the time, the order of a set, or random numbers"
        )

    def _may_go_everywhere(self, may_go: bool) -> bool:
        """Whether all workers may let a program go: they let go of the same ones, and compile those anew together."""
        if self.cluster.num_workers == 1:
            return may_go
        everyone = self.cluster.compare(self._key("may_go"), b"yes" if may_go else b"no")
        return all(said == b"yes" for said in everyone.values())

    def _warn(self, name: str, warnings: Iterable[str]) -> None:
        """Each warning of a step is said once, for whatever signature it is compiled, and if it is compiled again."""
        for warning in warnings:
            if (told := (name.rpartition("/")[0] or name, warning)) not in self._told:
                self._told.add(told)
                _log.warning("%s: %s", name, warning)

    def _require_same_launches(self, program: CompiledProgram) -> None:
        if self.cluster.num_workers == 1:
            return
        require_same_launches(self.cluster.compare(self._key("launches"), launches_text(program).encode()))

    def _key(self, what: str) -> str:
        self._next_agreement += 1
        return f"{self._name}/{self._next_agreement}/{what}"


def require_no_mixture(item: GraphItem, name: str) -> None:
    """Refuse a step whose loss mixes examples for certain: with a part of the batch on each replica it is another.

    Raises:
        CaptureError: the loss, by which ops and lines, what it trains, and what to do.
    """
    if item.mixtures:
        raise CaptureError(
            f"{name}: {'. '.join(item.mixtures)}. Each replica has a part of the batch only, so this is not what one "
            "device trains. If each replica is to mix its own part, as tf.distribute's do, say what the loss is over "
            'its part: AutoDist(loss_reduction="mean"), or "sum"; AutoDist(strict=False) takes it for a mean. Both '
            "warn of it. Or let each example meet only what is no part of the batch, such as a fixed sample"
        )


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


def launches_text(program: CompiledProgram) -> str:
    """The collectives of `program` in their order, a line each: what all workers must agree on."""
    groups = [(launch, sorted({_carried(program.graph.nodes[op]) for op in launch.ops})) for launch in program.launches]
    return "\n".join(f"{launch.what} at {launch.rank}: {', '.join(carried)}" for launch, carried in groups)


def _carried(collective: tf.compat.v1.NodeDef) -> str:
    return f"{collective.op} of {tf.as_dtype(collective.attr['T'].type).name}"


def require_same_launches(everyone: Mapping[int, bytes]) -> None:
    """Refuse programs whose collectives do not match: they would wait for each other for ever.

    Args:
        everyone: `launches_text` of each worker, by rank.

    Raises:
        AutoDistError: the first collective that differs, and between which workers.
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
