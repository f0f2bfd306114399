"""From a captured step to a program that runs on this worker: what all doors do after capture.

It owns the order of things between the workers: the same graph everywhere, the chief's strategy and initial values.
"""

import difflib
import logging
import re
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from autodist_py.kernel.analysis import analyse, varying_writes
from autodist_py.kernel.device import Place, resolve
from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.passes.read_data import END_OF_DATA, OTHER_DATA
from autodist_py.kernel.pipeline import CompiledProgram, compile
from autodist_py.kernel.printer import format_graph
from autodist_py.kernel.program import Options
from autodist_py.kernel.rewrite import Observer
from autodist_py.proto.errors import AutoDistError, CaptureError, ClusterError, WorkerFailedError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy
from autodist_py.proto.strategy_pb2 import Strategy as StrategyMessage
from autodist_py.runtime.aggregation import FirstToArrive
from autodist_py.runtime.cluster import Cluster
from autodist_py.runtime.copies import Copies
from autodist_py.runtime.executor import Executor
from autodist_py.runtime.initial_values import broadcast
from autodist_py.runtime.input_check import SAME_DATA_ADVICE, InputCheck
from autodist_py.runtime.kept import Kept
from autodist_py.runtime.parameter_server import Messages
from autodist_py.runtime.served_values import ServedValues
from autodist_py.strategy_builders.base import StrategyBuilder, build_strategy

_log = logging.getLogger(__name__)

_WRITES_SECONDS = 60.0
_NAMED = 3
"""How many names a warning lists."""


class _Served(NamedTuple):
    """A variable that lives on a server: its number, the same on every worker, and the server's rank."""

    number: int
    rank: int


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
        self._served: Kept[_Served] = Kept()  # the variables that live on servers
        self._num_served = 0
        self._numbered: dict[int, tf.Variable] = {}
        """Those that live here, until the end: other workers may ask when this one's script has let go of them."""
        self._stale: set[int] = set()
        """The identities of variables whose values on servers are newer than this worker's."""
        self._served_values: ServedValues | None = None
        self._next_agreement = 0
        self._messages: weakref.WeakSet[Messages] = weakref.WeakSet()
        self._serving = threading.Lock()
        self._apart: list[Messages] = []
        """Those of programs whose steps workers take by themselves."""

    def strategy(self, item: GraphItem) -> Strategy:
        """The strategy that the chief builds for `item`, on every worker.

        Raises:
            CaptureError: this worker's graph differs from the chief's; the message shows where.
            StrategyError: the builder cannot serve this graph or cluster.
        """
        self.pause()
        self._require_same_graph(item)
        message = b""
        if self.cluster.is_chief:
            message = build_strategy(self._builder, item, self._resources).to_proto().SerializeToString()
        agreed = self.cluster.agree(self._key("strategy"), message)
        return Strategy.from_proto(StrategyMessage.FromString(agreed))

    def distributed(
        self,
        item: GraphItem,
        strategy: Strategy,
        variables: Mapping[str, tf.Variable],
        state: Mapping[str, tf.Tensor],
        *,
        name: str,
        namespace: str = "",
    ) -> "StepProgram":
        """A program that all workers run together.

        Args:
            item: what was captured.
            strategy: how its variables are synchronized.
            variables: the user's variables, by their names in `item`.
            state: the tensors for its "state" inputs.
            name: what the program is called in profiles and causes of failure.
            namespace: see Executor.
        """
        place = resolve(strategy.replicas, self._resources, worker=self.cluster.rank)
        if place.num_replicas > 1 and self.cluster.is_chief:
            for warning in inexact(item):
                _log.warning("%s: %s", name, warning)
        self.broadcast_initial_values(variables)
        channel = f"{self.cluster.run_id}/{self._key('channel')}"
        options = replace(self._options, first_instance_key=self.cluster.next_instance_key, channel=channel)
        program = compile(item, strategy, place, options, observers=self._observers)
        self.cluster.next_instance_key = program.next_instance_key
        self._require_same_launches(program)
        fed = [source.name for source in item.inputs if source.kind == "feed"]
        checked_steps = self._checked_steps if program.pace.is_together else 0
        check = InputCheck(self.cluster, self._key("inputs"), fed, steps=checked_steps)
        self._serve(program, variables)
        executor = self._executor(program, variables, state, name, namespace)
        messages = None
        if program.channels:
            messages = Messages(self.cluster, program, executor.server_function, self._serving)
        step = StepProgram(executor, self.cluster, check, self._copies_of(program, variables), messages)
        if messages is not None:
            self._messages.add(messages)
            if program.pace.is_together:
                weakref.finalize(step, messages.close)
            else:  # Others may still take steps when this worker's script has let go of the program.
                self._apart.append(messages)
        return step

    def alone(
        self,
        item: GraphItem,
        variables: Mapping[str, tf.Variable],
        state: Mapping[str, tf.Tensor],
        *,
        name: str,
        namespace: str = "",
    ) -> "AloneProgram":
        """A program without the step's update, that this worker runs by itself on the whole of what it is given.

        No other worker takes part, nor is asked. One device runs it where nothing is batched, so that there is nothing
        to share out, and where it writes state.

        Raises:
            CaptureError: it writes state from this worker's own part of the batch, which the others do not see.
        """
        written = {v.name: variables[v.name] for v in item.variables if v.update_ops}
        if self._options.batch == "local" and self.cluster.num_workers > 1:
            # Nobody else takes part, so nothing is combined.
            for variable, writer in varying_writes(item, analyse(replace(item, statistics=()), batch="local")):
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
        return AloneProgram(self._executor(program, variables, state, name, namespace), variables, written, self)

    def _copies_of(self, program: CompiledProgram, variables: Mapping[str, tf.Variable]) -> "ServedCopies":
        elsewhere = {name for name, rank in program.held.items() if rank != self.cluster.rank}
        # Workers that step by themselves change what others were just brought.
        brought = program.refreshed if program.pace.is_together else frozenset()
        return ServedCopies(
            self,
            [each for name, each in variables.items() if name not in program.held or name in brought],
            frozenset(id(variables[name]) for name in elsewhere - brought),
            frozenset(id(variables[name]) for name in brought),
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
            self._stale.discard(id(variable))

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
            self.pause()
            self._require_same_writes(new)
            self.pull(new.values())
            broadcast(new, self.cluster)

    @property
    def backup_rules(self) -> list[FirstToArrive]:
        """Those by which this worker, as a server, drops what comes late."""
        rules = (rule for messages in self._messages for rule in messages.rules)
        return [rule for rule in rules if isinstance(rule, FirstToArrive)]

    def pause(self) -> None:
        """This worker is about to wait for all others: until then servers let none of them wait for its next step."""
        for messages in list(self._messages):
            messages.pause()

    def sync(self) -> None:
        """Give this worker's variables the values that they have on servers; every worker calls it.

        None goes on, and writes to them, before all have them.
        """
        if self._served_values is not None:
            if self._apart:
                self.pause()
                self.cluster.barrier(self._key("reached"))
            self.pull(variable for variable, _ in self._served.items())
            self.cluster.barrier(self._key("synchronized"))

    def pull(self, variables: Iterable[tf.Variable]) -> None:
        """Give these variables of this worker the values that they have on servers, if those are newer.

        No other worker need call it; this one is between two steps.
        """
        if self._served_values is None or not self._stale:
            return
        among = self._stale.intersection(map(id, variables))
        wanted: dict[int, dict[int, tf.Variable]] = {}
        for variable, served in self._served.items() if among else ():
            if id(variable) in among:
                wanted.setdefault(served.rank, {})[served.number] = variable
        for rank, named in wanted.items():
            self._served_values.pull(named, rank)
        self._stale -= among

    def stepped(self, stale: frozenset[int], current: frozenset[int]) -> None:
        """After a step these variables, by identity, are behind those of the servers, and those are not."""
        self._stale |= stale
        self._stale -= current

    def _serve(self, program: CompiledProgram, variables: Mapping[str, tf.Variable]) -> None:
        """From now on `program.held` live on servers."""
        if program.held and self._served_values is None:
            numbered = self._numbered
            name = f"{self.cluster.run_id}/{self._key('values')}"
            self._served_values = ServedValues(self.cluster, name, numbered.__getitem__)
        for name, rank in program.held.items():
            number = self._num_served = self._num_served + 1
            self._served[variables[name]] = _Served(number, rank)
            if rank == self.cluster.rank:
                self._numbered[number] = variables[name]

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

    def leave(self) -> None:
        """Where variables are served: wait until all workers leave, as they may ask for values until then."""
        if self._served_values is not None:
            self.pause()
            self.cluster.barrier(self._key("closed"))

    def close(self) -> None:
        """Let go of what is kept about the user's variables, and end what serves them."""
        for messages in list(self._messages):
            messages.close()
        self._apart.clear()
        if self._served_values is not None:
            self._served_values.close()
            self._served_values = None
        self._numbered.clear()
        self._stale.clear()
        self._copies.clear()
        self._broadcast.clear()
        self._served.clear()

    def _executor(
        self,
        program: CompiledProgram,
        variables: Mapping[str, tf.Variable],
        state: Mapping[str, tf.Tensor],
        name: str,
        namespace: str,
    ) -> Executor:
        devices = [replica.device for replica in program.place.local_replicas]
        copies = {
            (variable_name, position): copy
            for variable_name, variable in variables.items()
            for position, copy in enumerate(self._copies.of(variable, devices))
        }
        return Executor(program, copies, state, name=name.replace("/", "_"), namespace=namespace)

    def _require_same_graph(self, item: GraphItem) -> None:
        if self.cluster.num_workers == 1:
            return
        fingerprint = item.fingerprint.encode()
        everyone = self.cluster.compare(self._key("fingerprint"), fingerprint)
        if len(set(everyone.values())) == 1:
            return
        texts = self.cluster.compare(self._key("graph"), _item_text(item).encode())
        different = sorted(rank for rank, value in everyone.items() if value != everyone[0])
        raise CaptureError(
            f"the script must build the same graph on every worker, but {_workers(different)} another than the chief: "
            f"{_first_difference(texts[0].decode(), texts[different[0]].decode())}. Look for code that depends on the "
            "rank, the host, the time, the order of a set, or random numbers"
        )

    def _require_same_launches(self, program: CompiledProgram) -> None:
        if self.cluster.num_workers == 1:
            return
        require_same_launches(self.cluster.compare(self._key("launches"), launches_text(program).encode()))

    def _key(self, what: str) -> str:
        self._next_agreement += 1
        return f"{self._name}/{self._next_agreement}/{what}"


def inexact(item: GraphItem) -> Iterator[str]:
    """What of `item` is not, or may not be, computed as on one device, in sentences for the user."""
    if item.local_ops:
        yield (
            f"it is not seen that {_some(item.local_ops)} keep examples apart. Where they mix them, as batch "
            "normalization does, each replica mixes its own, so that results depend on the number of replicas; "
            "`autodist verify` tells whether they do"
        )
    if item.inseparable_ops:
        yield (
            f"it is not seen that {_some(item.inseparable_ops)} pass gradients on linearly. A term of the loss that "
            "depends on no example, as a regularizer does, is added to a sum over examples behind them, and counts "
            "once per replica; compute it apart from what the examples use, or take the mean over examples"
        )
    unknown = [gradient.variable for gradient in item.gradients if not gradient.reduction]
    if unknown:
        yield (
            f"the loss whose gradients train {_some(unknown)} is neither a sum nor a mean over examples, as far as its "
            f"graph shows; it is taken for a {item.loss_reduction}, as AutoDist(loss_reduction=...) says"
        )


def _some(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - _NAMED} more" if len(distinct) > _NAMED else ""
    return ", ".join(f"'{name}'" for name in distinct[:_NAMED]) + more


class ServedCopies:
    """A program's variables that live on servers of other workers: when this worker's are behind, and when not."""

    def __init__(
        self, compiler: Compiler, read: Sequence[tf.Variable], behind: frozenset[int], refreshed: frozenset[int]
    ):
        """The program reads `read`; its steps leave `behind` behind, and bring `refreshed`, by identity."""
        self._compiler, self._read, self._behind, self._refreshed = compiler, list(read), behind, refreshed

    def before_step(self) -> None:
        """Bring what the program reads up to date."""
        self._compiler.pull(self._read)

    def after_step(self) -> None:
        """Note what the step has changed elsewhere."""
        self._compiler.stepped(self._behind, self._refreshed)


class StepProgram:
    """A distributed program: counts its steps, and reports the cluster's one cause when it fails."""

    def __init__(
        self,
        executor: Executor,
        cluster: Cluster,
        check_inputs: InputCheck,
        copies: ServedCopies,
        messages: Messages | None = None,
    ):
        self._executor = executor
        self._copies = copies
        self._messages = messages
        self._cluster = cluster
        self._check_inputs = check_inputs

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """One step, together with all other workers.

        Raises:
            WorkerFailedError: another worker failed; the message names it, and why.
            ClusterError: the workers are given different batches.
            OutOfRangeError: an iterator that the step reads has ended, on this worker or another.
        """
        self._cluster.check()
        if self._messages is not None and self._messages.is_closed:
            raise ClusterError("a step after one that failed half-way cannot be run: its servers have ended")
        self._cluster.step += 1
        self._check_inputs(feeds)
        self._copies.before_step()
        try:
            results = self._executor.run(feeds)
        except tf.errors.OpError as error:
            if self._messages is not None and self._messages.is_closed:
                raise self._cluster.failure() or self._messages.error or error from error
            data_error = _data_error(error)
            failure = self._cluster.failure() if data_error is None else self._cluster.failure(wait=0.0)
            if failure is not None:
                raise failure from error
            if data_error is None or data_error is error:
                raise
            raise data_error from error
        self._copies.after_step()
        return results


class AloneProgram:
    """A program that this worker runs by itself."""

    def __init__(
        self,
        executor: Executor,
        variables: Mapping[str, tf.Variable],
        written: Mapping[str, tf.Variable],
        compiler: Compiler,
    ):
        self._executor = executor
        self._variables = list(variables.values())
        self._written = written
        self._compiler = compiler

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """One run."""
        self._compiler.pull(self._variables)
        results = self._executor.run(feeds)
        if self._written:
            self._compiler.written_alone(self._written)
        return results


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


def _data_error(error: tf.errors.OpError) -> Exception | None:
    """What `error` says of the data that a step reads by itself, if it does; no failure of a worker looks like that."""
    if isinstance(error, tf.errors.OutOfRangeError):
        return error
    found = re.search(f"({re.escape(END_OF_DATA)}|{re.escape(OTHER_DATA)})\\] \\[([0-9 ]*)\\]", error.message)
    if found is None:
        return None
    what, workers = found[1], found[2].replace(" ", ", ")
    if what == END_OF_DATA:
        return tf.errors.OutOfRangeError(error.node_def, error.op, f"End of sequence on workers {workers}")
    return ClusterError(
        f"every worker must be given the same global batch, but what the iterator gives on workers {workers} differs "
        f"from the chief's. {SAME_DATA_ADVICE}"
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
