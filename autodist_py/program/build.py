"""From a captured step to a program that runs on this worker: what all doors do after capture.

It owns the order of things between the workers: the same graph everywhere, the chief's strategy and initial values.
`distributed` lists the phases, each of which rests on what all workers have agreed on in the one before.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.capture.inexact import inexact
from autodist_py.cluster import horovod
from autodist_py.cluster.cluster import Cluster
from autodist_py.diagnostics.memory_check import MemoryCheck, is_checked
from autodist_py.diagnostics.plan import Planner
from autodist_py.diagnostics.timeline import Timeline
from autodist_py.kernel.analysis.own_state import own_state
from autodist_py.kernel.collectives.engines import Engine, automatic_engine, slowest_bandwidth, with_engine
from autodist_py.kernel.ir.dataflow import writes_of_own_part
from autodist_py.kernel.pipeline import CompiledProgram, compile
from autodist_py.kernel.program import Options
from autodist_py.kernel.runner import AddedPass, Observer
from autodist_py.kernel.topology import Topology, resolve
from autodist_py.program.agreement import Agreement
from autodist_py.program.compressor_state import CompressorStates
from autodist_py.program.executor import Executor
from autodist_py.program.initial_values import InitialValues
from autodist_py.program.replica_variables import ReplicaVariables
from autodist_py.program.served_step import ServedStep
from autodist_py.program.step import AloneProgram, StepProgram
from autodist_py.program.step_hooks import StepHooks
from autodist_py.proto.errors import CaptureError, StrategyError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy
from autodist_py.proto.strategy_pb2 import Strategy as StrategyMessage
from autodist_py.servers.parameter_servers import ParameterServers, RemoteVariables
from autodist_py.strategy_builders.base import StrategyBuilder, build_strategy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedStep:
    """What a door has captured, and a program is made of.

    Attributes:
        item: the graph.
        variables: the user's variables, by their names in `item`.
        state: the tensors for its "state" inputs.
        name: what the program is called in profiles and causes of failure.
        namespace: see Executor.
        examples: how many this worker is given in the step that is compiled for; None: not known.
        own: names of inputs that are each worker's own, and not compared.
        may_go: whether this worker could let the program go; it may if all could.
        line_of: the user's line that has made an op of the graph, by the op's name; "": it is not known.
    """

    item: GraphItem
    variables: Mapping[str, tf.Variable]
    state: Mapping[str, tf.Tensor] = field(default_factory=dict)
    name: str
    namespace: str = ""
    examples: int | None = None
    own: Collection[str] = ()
    may_go: bool = True
    line_of: Callable[[str], str] = lambda op: ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel, as one AutoDist object uses it.

    Attributes:
        options: of all programs.
        observers: see the programs after each pass.
        passes: the user's own, each with the pass that it follows.
    """

    options: Options
    observers: Sequence[Observer] = ()
    passes: Sequence[AddedPass] = ()

    def compiled(self, item: GraphItem, strategy: Strategy, topology: Topology, **own: Any) -> CompiledProgram:
        """The program of `item`; `own` are options of this program alone."""
        options = replace(self.options, **own)
        return compile(item, strategy, topology, options, observers=self.observers, added=self.passes)


class StepWarnings:
    """What is said of steps: once of each, for whatever signature it is compiled, and if it is again."""

    def __init__(self, *, is_heard: bool):
        """Nothing is said yet; `is_heard`: somebody reads what this worker says."""
        self._is_heard = is_heard
        self._said: set[tuple[str, str]] = set()

    def say(self, name: str, warnings: Iterable[str]) -> None:
        """Warn the user of the step that the program of that name is of."""
        if not self._is_heard:
            return
        for warning in warnings:
            if (said := (name.rpartition("/")[0] or name, warning)) not in self._said:
                self._said.add(said)
                _log.warning("%s: %s", name, warning)


class Compiler:
    """Makes programs for one AutoDist object."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        resources: ResourceSpec,
        builder: StrategyBuilder,
        kernel: Kernel,
        checked_steps: int = 0,
        timeline: Path | None = None,
    ):
        """Nothing is compiled yet.

        Args:
            name: the AutoDist object's.
            cluster: the workers.
            resources: their devices.
            builder: builds the strategies.
            kernel: compiles the programs.
            checked_steps: in how many steps of a program its inputs are compared, where all are given the whole batch.
            timeline: a file for what some steps do; None: they are not traced.
        """
        self.cluster = cluster
        self.agreement = Agreement(cluster, name)
        self.parameter_servers = ParameterServers(cluster, self.agreement.key, resources.server_devices)
        """The variables that live on servers."""
        self.values = InitialValues(cluster, self.agreement, self.parameter_servers)
        self.compressor_states = CompressorStates()
        pause = self.parameter_servers.pause
        self.hooks = StepHooks(
            cluster,
            checked_steps=checked_steps if kernel.options.batch == "global" else 0,
            timeline=Timeline(timeline, cluster, key=f"{name}/timeline", pause=pause) if timeline else None,
        )
        self.copies = ReplicaVariables()
        """Of the user's variables, for this worker's further replicas."""
        self._resources = resources
        self._builder = builder
        self._kernel = kernel
        self._warnings = StepWarnings(is_heard=cluster.is_chief)

    @property
    def shares_batches(self) -> bool:
        """Whether all workers are given the same batch, of which each takes its part."""
        return self._kernel.options.batch == "global" and self.cluster.num_workers > 1

    def strategy(self, item: GraphItem, examples: int | None = None) -> Strategy:
        """The strategy that the chief builds for `item`, whose first step has so many examples, on every worker.

        Raises:
            CaptureError: this worker's graph differs from the chief's; the message shows where.
            StrategyError: the builder cannot serve this graph or cluster.
        """
        self.parameter_servers.pause()
        self.agreement.require_same_graph(item)
        message = b""
        if self.cluster.is_chief:
            builder = self._builder
            if isinstance(builder, Planner):
                builder = replace(builder, examples=examples)
            message = build_strategy(builder, item, self._resources).to_proto().SerializeToString()
        agreed = self.cluster.broadcast(self.agreement.key("strategy"), message)
        return Strategy.from_proto(StrategyMessage.FromString(agreed), is_own=True)

    def replica_program(self, step: CapturedStep) -> CompiledProgram:
        """The program of a replica function, which stands in the user's own graphs: it takes no steps of its own.

        Every worker makes it, and the strategy is the chief's.

        Raises:
            CaptureError: this worker's graph differs from the chief's.
            StrategyError: the builder cannot serve this function, or the strategy asks for servers or shards.
        """
        strategy = self.strategy(step.item)
        program = self._compiled(step, self._with_engine_started(step, strategy), self.topology(strategy))
        self._warnings.say(step.name, self._otherwise(program, strategy))
        return program

    def served_step(self, step: CapturedStep, **options: Any) -> ServedStep:
        """As `replica_program`, where variables may live on servers or in shards; `options` are of this program alone.

        Raises:
            CaptureError: this worker's graph differs from the chief's.
            StrategyError: the builder cannot serve this function, or has workers take their steps by themselves.
        """
        with tf_adapter.eagerly():
            strategy = self.parameter_servers.at_home(self.strategy(step.item), step.variables)
            if not strategy.consistency.is_bsp:
                raise StrategyError(
                    "replicas of tf.distribute take each step together; the strategy has workers take their steps by "
                    f"themselves: {strategy.consistency}. Leave sync=False, staleness and replicas_to_aggregate out"
                )
            program = self._compiled(
                step, self._with_engine_started(step, strategy), self.topology(strategy), **options
            )
            self._warnings.say(step.name, self._otherwise(program, strategy))
            variables, copies = self._placed(step, program, strategy)
        return ServedStep(program, variables, self.cluster, self.parameter_servers, copies)

    def distributed(self, step: CapturedStep, strategy: Strategy) -> StepProgram:
        """A program that all workers run together; each of them makes it, and what they agree on is the chief's.

        Raises:
            CaptureError: the step's loss mixes examples, or state is written in a way that replicas cannot be kept
                equal by.
            StrategyError: the strategy asks for what these devices, or this version, cannot do.
            ClusterError: the workers did not all write the same variables.
        """
        begin = time.perf_counter()
        strategy = self.parameter_servers.at_home(strategy, step.variables)
        topology = self.topology(strategy)
        if topology.num_replicas > 1:
            if self._kernel.options.refuses_mixtures:
                require_no_mixture(step.item, step.name)
            self._warnings.say(step.name, inexact(step.item))
        self.values.broadcast(step.variables)
        program = self._compiled(step, self._with_engine_started(step, strategy), topology)
        self._warnings.say(step.name, self._otherwise(program, strategy))
        made = self._bound(step, program, strategy)
        _log.info(
            "%s: compiled in %.1f s for %d replicas on %d workers: %d variables, %d of them on servers or in shards, "
            "%d collectives a step",
            step.name,
            time.perf_counter() - begin,
            topology.num_replicas,
            self.cluster.num_workers,
            len(step.item.variables),
            len(program.held),
            len(program.collectives),
        )
        return made

    def _compiled(self, step: CapturedStep, strategy: Strategy, topology: Topology, **own: Any) -> CompiledProgram:
        """The program, whose schedule all workers have; its collectives are of this process alone."""
        program = self._kernel.compiled(
            step.item,
            strategy,
            topology,
            first_instance_key=self.cluster.next_instance_key,
            channel=f"{self.cluster.run_id}/{self.agreement.key('channel')}",
            examples=int(self.agreement.chiefs("examples", str(step.examples or 0))) or None,
            bandwidth=slowest_bandwidth(self._resources),
            **own,
        )
        self.cluster.next_instance_key = program.next_instance_key
        self.agreement.require_same_schedule(program)
        return program

    def _bound(self, step: CapturedStep, program: CompiledProgram, strategy: Strategy) -> StepProgram:
        """The program with variables, servers and hooks: it can run."""
        variables, copies = self._placed(step, program, strategy)
        executor = self._executor(step, program, variables)
        messages = self.parameter_servers.serve(program, executor.server_function)
        is_bsp = program.consistency.is_bsp
        hooks = self._memory_check(step, program) + self.hooks.of(
            program,
            step.name,
            timeout=strategy.timeout_seconds,
            key=self.agreement.key("inputs"),
            own=step.own,
            messages=messages,
            variables=copies,
        )
        may_go = self.agreement.may_go_everywhere(step.may_go and is_bsp and not own_state(step.item))
        made = StepProgram(executor, self.cluster, hooks, added=self.hooks.added, may_go=may_go)
        if messages is not None and is_bsp:
            messages.close_with(made)
        return made

    def _placed(
        self, step: CapturedStep, program: CompiledProgram, strategy: Strategy
    ) -> tuple[dict[str, tf.Variable], RemoteVariables]:
        """The program's variables on this worker, by name, each of which lives somewhere now; and what is elsewhere."""
        states = self.compressor_states.of(program.compressor_states, step.variables, self.cluster.num_workers)
        variables = {**step.variables, **states}
        shards = self.parameter_servers.hold(program, strategy, variables)
        return {**step.variables, **shards}, self.parameter_servers.copies(program, variables)

    def alone(self, step: CapturedStep) -> AloneProgram:
        """A program without the step's update, that this worker runs by itself on the whole of what it is given.

        No other worker takes part, nor is asked. One device runs it where nothing is batched, so that there is nothing
        to share out, and where it writes state.

        Raises:
            CaptureError: it writes state from this worker's own part of the batch, which the others do not see.
        """
        written = {one.name: step.variables[one.name] for one in step.item.variables if one.update_ops}
        if self._kernel.options.batch == "local" and self.cluster.num_workers > 1:
            # Nobody else takes part, so nothing is combined.
            for variable, writer in writes_of_own_part(step.item):
                raise CaptureError(
                    f"variable '{variable}' is written by '{writer}' with what depends on this worker's own part of "
                    'the batch (batch="local"). In a run that each worker does by itself it would differ between '
                    "workers. Write it in the training step, or not at all"
                )
        everywhere = Strategy(node_config=(), replicas=self._resources.replica_devices)
        topology = self.topology(everywhere).alone()
        if written or not any(source.batched for source in step.item.inputs):
            topology = Topology(topology.worker, topology.replicas[:1])
        program = self._kernel.compiled(step.item, everywhere, topology)
        return AloneProgram(
            self._executor(step, program, step.variables),
            step.variables,
            written,
            self.parameter_servers.directory,
            self.values.written_alone,
            self._memory_check(step, program),
            may_go=step.may_go and not own_state(step.item),
        )

    def topology(self, strategy: Strategy) -> Topology:
        """Where this worker stands among the strategy's replicas."""
        return resolve(strategy.replicas, self._resources, worker=self.cluster.rank)

    def close(self) -> None:
        """Let go of what is kept about the user's variables, and end what serves them."""
        self.hooks.close()
        self.parameter_servers.close()
        self.copies.clear()
        self.values.clear()

    def _with_engine_started(self, step: CapturedStep, strategy: Strategy) -> Strategy:
        """`strategy`, with the engine that AUTO stands for in its place: on all workers the same.

        Horovod is started for it, if need be. Where that cannot be, AUTO stands for RING.

        Raises:
            StrategyError, ClusterError: Horovod is asked for by its name, and a worker has no use of it.
        """
        own = automatic_engine(step.item, strategy, self._resources)
        chosen = with_engine(strategy, step.item, cast(Engine, self.agreement.chiefs("engine", own)))
        if self.cluster.num_workers == 1 or not horovod.is_asked_for(chosen):
            return chosen
        obstacle = horovod.obstacle(self.cluster, self._resources, self.agreement.key)
        if obstacle is None:
            horovod.start(self.cluster, self._resources, self.agreement.key)
            return chosen
        if horovod.is_asked_for(strategy):
            raise obstacle
        _log.info("%s: all_reduce_spec AUTO stands for RING, without Horovod: %s", step.name, obstacle)
        return strategy

    def _executor(self, step: CapturedStep, program: CompiledProgram, variables: Mapping[str, tf.Variable]) -> Executor:
        copies = {(name, 0): variable for name, variable in variables.items()}
        for bound in program.variables:
            if bound.replica:
                own = variables[bound.variable]
                copies[bound.variable, bound.replica] = self.copies.of(own, bound.replica, bound.device)
        return Executor(program, copies, step.state, name=step.name.replace("/", "_"), namespace=step.namespace)

    def _memory_check(self, step: CapturedStep, program: CompiledProgram) -> tuple[MemoryCheck, ...]:
        if not is_checked(program):
            return ()
        return (MemoryCheck(program, step.name, batch=self._kernel.options.batch, line_of=step.line_of),)

    def _otherwise(self, program: CompiledProgram, strategy: Strategy) -> Iterator[str]:
        """What of the program is not as it was asked for, in sentences for the user."""
        yield from self.hooks.otherwise(program)
        yield from strategy.replaced
        for variable, reason in program.left_whole.items():
            yield f"'{variable}' is trained whole: {reason}"


def require_no_mixture(item: GraphItem, name: str) -> None:
    """Refuse a step whose loss mixes examples for certain: with a part of the batch on each replica it is another.

    Raises:
        CaptureError: the loss, by which ops and lines, what it trains, and what to do.
    """
    if item.mixtures:
        raise CaptureError(
            f"{name}: {'. '.join(item.mixtures)}. Each replica has a part of the batch only, so this is not what one "
            'device trains. AutoDist(batch_statistics="global"), the default, computes it of the whole batch if all '
            "its ops can be followed. Or let replicas mix their parts, as tf.distribute's do: say what the "
            'loss is over a part by AutoDist(batch_statistics="replica", loss_reduction="mean"), or "sum". '
            "AutoDist(strict=False) takes it for a mean. Both warn of it. Or let each example meet only what is no "
            "part of the batch, such as a fixed sample"
        )
