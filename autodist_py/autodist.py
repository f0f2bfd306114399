"""`AutoDist`: what the user holds. It joins the cluster, and opens the doors through which code is captured.

Over 400 lines, most of them what the docstrings of one public class tell the user.
"""

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions, require_choices
from autodist_py.capture.doors.function import CapturedFunction
from autodist_py.capture.doors.keras import compiled_models, refused_models
from autodist_py.capture.doors.keras_steps import Workers
from autodist_py.capture.doors.outside import refused_gradients, require_no_strategy
from autodist_py.cluster.cluster import join_cluster
from autodist_py.cluster.exit_hooks import one_line
from autodist_py.cluster.seeds import share_seed
from autodist_py.cluster.step_hook import StepHook
from autodist_py.config.logs import show_logs
from autodist_py.config.resource_spec import given_resource_spec, local_resource_spec
from autodist_py.config.settings import KEPT_PROGRAMS_VARIABLE, Settings
from autodist_py.diagnostics.pass_dump import dumps
from autodist_py.diagnostics.plan import Planner
from autodist_py.diagnostics.planned_schedule import planned_schedule
from autodist_py.kernel.pipeline import PASSES
from autodist_py.kernel.program import Options
from autodist_py.kernel.runner import AddedPass, with_added
from autodist_py.program.build import Compiler, Kernel
from autodist_py.program.graph_mode import GraphMode
from autodist_py.program.kept_programs import Bound
from autodist_py.program.mode import mode_of
from autodist_py.program.session import DistributedSession
from autodist_py.program.step_function import DistributedFunction, Program, StepFunctions
from autodist_py.proto.arguments import checked
from autodist_py.proto.errors import AutoDistError, CaptureError, ClusterError, WorkerFailedError
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy
from autodist_py.saving.chief_writes import ChiefWrites
from autodist_py.servers.update_rules import FirstToArrive, Tokens
from autodist_py.strategy_builders.base import StrategyBuilder, resolve_builder
from autodist_py.tf_adapter import sharded

_log = logging.getLogger(__name__)

_POLICIES = {policy.name.lower(): policy for policy in tf.data.experimental.AutoShardPolicy if policy.name != "HINT"}


class AutoDist:
    """Single-device training code in, distributed training out.

    With several workers it joins the cluster and starts the others, so it comes before anything of TensorFlow's that is
    made eagerly (variables, models, iterators), as `hvd.init()` does. With one worker there is no such rule.

    Args:
        resource_spec_file: a YAML file that says what to train on; None: what `autodist run` was given, else this
            machine (its GPUs, or one CPU). A `ResourceSpec` does too.
        strategy_builder: how to distribute: a builder, or its name with or without arguments, say
            "AllReduce(chunk_size=32)". Default: AllReduce.
        batch: "global": every worker is given the same, whole batch, and takes its slice; "local": each worker's batch
            is its own part.
        loss_reduction: what the loss does over examples, "mean" or "sum", where its graph does not show it; it also
            says, with batch_statistics="replica", that a loss which mixes examples is to mix those of each replica's
            own part; such a loss is refused there otherwise. Default: "mean".
        batch_statistics: what is mixed where a step mixes the examples of a batch. "global": those of the whole batch,
            as on one device (batch normalization, in-batch negatives, the logarithm of a mean); what cannot be followed
            is refused. "replica": those of each replica's part in batch normalization, which needs fewer messages;
            losses that mix examples are refused. A dict says either for layers, by patterns of their names or paths,
            the first that fits: {"resnet/*": "replica"}; all others are "global". A layer's own statistics may be read
            in its name scope alone, and be averaged by what it writes.
        random: which random numbers a step draws. "replica": each replica its own ones, the first those of one device.
            "global": those of one device, so that a run with dropout equals one device's number by number. Each replica
            then draws the numbers of all examples, and uses those of its own. It needs batch_statistics="global".
        fetch_reduction: how a float that differs between replicas is returned, "mean" (over examples) or "sum".
        sum_duplicates: sum duplicate rows of a sparse gradient before the update sees them. That is another
            algorithm for optimizers that square each row by itself (Keras's Adam family).
        strict: refuse what can be done in another way only: to train with a loss that mixes the examples of a batch,
            of which each replica has a part; to train a variable whole that the strategy cuts into shards, where its
            update cannot be cut; to use RING in the place of NCCL, which runs on GPUs only. Else warn of it.
        seed: the seed of random numbers; None: one that the chief chooses, unless the user sets one.
        passes: rewriting steps of your own, on every worker the same (docs/writing-a-pass.md).

    Raises:
        AutoDistError: what is given for a pass is none.
        ResourceSpecError: the file is no valid resource spec.
        StrategyError: no such builder, or wrong arguments.
        ClusterError: the workers could not be joined.
    """

    _numbers = itertools.count()

    @checked(
        "resource_spec_file",
        *(
            "batch",
            "loss_reduction",
            "batch_statistics",
            "random",
            "fetch_reduction",
            "sum_duplicates",
            "strict",
            "seed",
        ),
        error=AutoDistError,
    )
    def __init__(
        self,
        resource_spec_file: str | os.PathLike[str] | ResourceSpec | None = None,
        strategy_builder: StrategyBuilder | str | None = None,
        *,
        batch: str = "global",
        loss_reduction: str | None = None,
        batch_statistics: str | Mapping[str, str] = "global",
        random: str = "replica",
        fetch_reduction: str = "mean",
        sum_duplicates: bool = False,
        strict: bool = True,
        seed: int | None = None,
        passes: Sequence[AddedPass] = (),
    ):
        stated, loss_reduction = loss_reduction, "mean" if loss_reduction is None else loss_reduction
        given: dict[str, Any] = {"batch": batch, "loss_reduction": loss_reduction, "fetch_reduction": fetch_reduction}
        batch_statistics = batch_statistics if isinstance(batch_statistics, str) else dict(batch_statistics)
        given |= {"batch_statistics": batch_statistics, "random": random}
        require_choices(given)
        with_added(PASSES, passes)  # Refuses what is none, before a worker is started.
        settings = Settings.from_environment()
        show_logs(settings.log_level)
        if settings.record_dir is not None and batch != "global":
            raise AutoDistError(
                f"a run is compared with one device on the same batches, and with batch={batch!r} each worker has its "
                "own; verify the script with batch='global'"
            )
        builder = resolve_builder(settings.strategy or strategy_builder)
        # What is compared or planned runs where the command says, whatever the script would run on.
        resources = given_resource_spec(
            None if settings.record_dir or settings.plan_dir else resource_spec_file, settings
        )
        options = Options(
            batch=batch,
            fetch_reduction=fetch_reduction,
            sum_duplicates=sum_duplicates,
            strict=strict,
            refuses_mixtures=strict and (batch_statistics != "replica" or stated is None),
        )
        if settings.plan_dir and resources is not None:
            builder = Planner(builder, resources, settings.plan_dir, partial(planned_schedule, options=options))
            resources = local_resource_spec(1)
        seed = settings.seed if seed is None else seed
        self._cluster = join_cluster(resources, settings)
        self.resources = self._cluster.resources
        self._capture_options = CaptureOptions(
            loss_reduction,
            batch,
            shows_ops=settings.recorded_run == "ops",
            batch_statistics=batch_statistics,
            random=random,
            num_workers=self._cluster.num_workers,
            num_replicas=len(self.resources.replica_devices),
        )
        self._name = f"autodist-{next(self._numbers)}"
        given |= {"loss_reduction": str(stated), "sum_duplicates": str(sum_duplicates), "strict": str(strict)}
        given |= {"passes": str([one.name for one in passes])}
        given |= {"seed": str(seed), KEPT_PROGRAMS_VARIABLE: str(settings.kept_programs)}
        require_same_arguments(self._cluster.compare(f"{self._name}/arguments", json.dumps(given).encode()))
        share_seed(self._cluster, seed, key=f"{self._name}/seed")
        self._compiler = Compiler(
            self._name,
            self._cluster,
            self.resources,
            builder,
            Kernel(options, dumps(settings.dump_dir, self._name), passes),
            settings.checked_steps,
            settings.timeline,
        )
        self._mode = mode_of(settings, self._compiler, self._capture_options)
        if self._cluster.num_workers > 1:
            ChiefWrites.of(self._cluster).pause_before_waiting(self._compiler.parameter_servers)
        kept = Bound(settings.kept_programs, _log.warning if self._cluster.is_chief else _log.debug)
        self._functions = StepFunctions(f"{self._name}/function", self._capture_options, kept)
        graph_seed = self._cluster.seed if seed is None and self._capture_options.num_replicas > 1 else seed
        self._graph_mode = GraphMode(self._capture_options, graph_seed, kept)
        self._closed = False

    @property
    def rank(self) -> int:
        """This worker's rank; the chief's is 0."""
        return self._cluster.rank

    @property
    def num_workers(self) -> int:
        """How many workers train together."""
        return self._cluster.num_workers

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the chief: the one that writes files and prints."""
        return self._cluster.is_chief

    @checked("hook", error=AutoDistError)
    def add_step_hook(self, hook: StepHook) -> None:
        """From now on this worker calls `hook` around each step that all workers take, within the hooks added before.

        Raises:
            AutoDistError: it is no `StepHook`.
        """
        self._require_open("add_step_hook")
        self._compiler.hooks.added.append(hook)

    @checked("function", "batched", error=CaptureError)
    def function(
        self,
        function: Callable[..., Any] | None = None,
        *,
        batched: Sequence[str] | set[str] | frozenset[str] | None = None,
    ) -> Any:
        """Distribute a step function; used as `@autodist.function`, or with arguments.

        Args:
            function: computes one training step of one device: a Python function, a method or a tf.function.
            batched: the names of the arguments whose first dimension is a batch; None: the first array argument, and
                those that share its leading size. Batches of other sizes (labelled examples and others, say) are cut
                in the same proportions.

        Returns:
            A function that is called alike, trains on the global batch, and returns what one device would have.
        """
        if function is None:
            return lambda decorated: self.function(decorated, batched=batched)
        return self._function(function, batched=batched, together=False)

    def _function(
        self,
        function: Callable[..., Any],
        *,
        batched: Collection[str] | None,
        together: bool,
        own: Collection[str] = (),
    ) -> DistributedFunction:
        """A distributed step; `together`: all workers run it also where it trains nothing; `own`: see the class."""
        self._require_open("function")
        return self._functions.make(function, partial(self._compile, together=together), batched=batched, own=own)

    @checked("dataset", "policy", error=AutoDistError)
    def shard(self, dataset: tf.data.Dataset, policy: str = "auto") -> tf.data.Dataset:
        """This worker's part of `dataset`, for data too large for every worker to read all: with `batch="local"`.

        A step then trains on the batches of all workers together.

        Args:
            dataset: the same on every worker, in the same order; its batches are a worker's.
            policy: "file": each worker reads files of its own; there must be as many as workers; "data": each reads
                all, and takes each `num_workers`-th element (a batch, where it is batched); "auto": by files where it
                reads files, else by data; "off": all of it.

        Raises:
            AutoDistError: no such policy; every worker is to be given the whole batch (`batch="global"`); or the
                dataset reads no files.
        """
        self._require_open("shard")
        if policy not in _POLICIES:
            raise AutoDistError(f"policy must be one of {', '.join(_POLICIES)}; received {policy!r}")
        if policy == "off" or self.num_workers == 1:
            return dataset
        if self._capture_options.batch != "local":
            raise AutoDistError(
                "shard() gives each worker its own part, and with batch='global' every worker must be given the same "
                "batch, of which it takes its slice. Say AutoDist(batch='local'), or leave shard() out"
            )
        try:
            return sharded(dataset, _POLICIES[policy], num_shards=self.num_workers, index=self.rank)
        except tf.errors.NotFoundError as error:
            raise AutoDistError(
                "shard(policy='file') shares out the files that a dataset reads, and none was found in this one; use "
                "'data', or 'auto'"
            ) from error

    @contextmanager
    def scope(self) -> Iterator[Self]:
        """Capture what is built in here.

        Keras 3 models that are compiled in here train on the cluster when they are fitted: `fit` is given the global
        batch, and does what it does on one device. In graph mode (`with tf.Graph().as_default(), autodist.scope():`)
        the graph is the single-device program; `create_distributed_session()` compiles it.

        With several workers, what trains in here in another way is refused: every worker would train by itself.

        Raises:
            CaptureError: a second graph under the same AutoDist object; or a Keras model is compiled for another
                backend, or with options that make a step no graph; or, with several workers, a gradient of a variable
                is computed outside of what is captured.
        """
        self._require_open("scope")
        require_no_strategy("scope() is entered")
        with ExitStack() as stack:
            captured = None if tf.executing_eagerly() else self._graph_mode.scope()
            if self.num_workers > 1:
                stack.enter_context(refused_gradients(captured.graph if captured else None))
            if captured is None:
                stack.enter_context(compiled_models(self._keras_workers()))
                self._look_for_writers()
            else:
                if self.num_workers > 1:
                    stack.enter_context(refused_models())
                stack.enter_context(captured.recording())
            yield self

    def create_distributed_session(self, *, hooked: bool = False) -> DistributedSession:
        """A session over the graph that was built in `scope()`, with the interface of `tf.compat.v1.Session`.

        Args:
            hooked: workers may fetch other tensors beside a step, as hooks do: they agree on them in each step. It is
                what `autodist_py.distribute.SessionCreator` asks for.

        Raises:
            CaptureError: no graph was built in `scope()`; or there is an open session already.
        """
        self._require_open("create_distributed_session")
        return self._graph_mode.session(self._mode, hooked=hooked)

    @checked("step", error=CaptureError)
    def build_strategy(self, step: DistributedFunction | None = None, *args: Any, **kwargs: Any) -> Strategy:
        """The strategy for the graph built in `scope()`, or for `step` called with these arguments; no step is run.

        Every worker calls it: they compare their graphs, and take the chief's strategy.

        Raises:
            CaptureError: neither a graph nor a step is given.
        """
        self._require_open("build_strategy")
        if step is not None:
            return self._compiler.strategy(step.captured(*args, **kwargs).item)
        return self._compiler.strategy(self._graph_mode.item())

    def replica_compiler(self) -> Compiler:
        """What compiles programs for this object's workers: `autodist_py.distribute.AutoDistStrategy` asks for it."""
        self._require_open("AutoDistStrategy")
        return self._compiler

    def sync(self) -> None:
        """Bring the user's variables up to date with the running state; every worker calls it.

        What lives on another worker, as a server, and is read by nobody in the step (an optimizer's state, averages of
        weights) is brought to this worker when eager code looks at it. A `tf.function` does not look: call this before
        it reads such variables.
        """
        self._require_open("sync")
        self._compiler.parameter_servers.sync()

    @property
    def compressor_state(self) -> tf.Module:
        """What compressors keep from step to step, such as the error of the last one's gradients: for checkpoints.

        `tf.train.Checkpoint(model=model, optimizer=optimizer, compressors=autodist.compressor_state)` saves and
        restores it with the rest, also before the first step, in a run of as many workers. Each variable in it has the
        values of all workers, in rank order.
        """
        return self._compiler.compressor_states

    def accepted_gradients(self) -> list[tuple[int, int]]:
        """The gradients that were applied under `replicas_to_aggregate`, in order; the last 100,000 of them.

        Returns:
            For each the number of updates that its worker had seen when it was computed, and the worker's rank.

        Raises:
            ClusterError: this worker is no server that drops gradients.
        """
        return [(one.step, one.worker) for rule in self._backup_rules() for one in rule.accepted]

    def dropped_gradients(self) -> dict[int, int]:
        """How many gradients of each worker came too late under `replicas_to_aggregate`, by rank.

        Raises:
            ClusterError: this worker is no server that drops gradients.
        """
        dropped = Counter(dict.fromkeys(range(self.num_workers), 0))
        for rule in self._backup_rules():
            dropped.update(rule.dropped)
        return dict(dropped)

    def _backup_rules(self) -> list[FirstToArrive | Tokens]:
        self._require_open("accepted_gradients")
        rules = self._compiler.parameter_servers.backup_rules
        if not rules:
            raise ClusterError(
                f"what was accepted and dropped is known where gradients are, on a server with replicas_to_aggregate; "
                f"worker {self.rank} is none, or has run no step yet. PS() serves on the chief"
            )
        return rules

    def close(self) -> None:
        """End this object's work: its programs and copies are let go, the user's variables stay as they are.

        With variables on servers, all workers close together: until then they may ask for values.
        """
        self._close(together=True)

    def _close(self, *, together: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if together and self._cluster.failure(wait=0.0) is None:
                self._compiler.parameter_servers.leave()
        finally:
            self._graph_mode.close()
            self._functions.clear()
            self._compiler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (
            isinstance(error, Exception)
            and not isinstance(error, WorkerFailedError)
            and self._compiler.parameter_servers.is_any
        ):
            self._compiler.parameter_servers.directory.bring_back()  # While they can be asked.
            self._cluster.abort(one_line(error))  # The others would wait for this worker's next message.
        self._close(together=error is None)

    def _keras_workers(self) -> Workers:
        numbers = itertools.count()

        def compare(value: bytes) -> Mapping[int, bytes]:
            self._compiler.parameter_servers.pause()
            return self._cluster.compare(f"{self._name}/keras/{next(numbers)}", value)

        def await_chief(topology: str) -> None:
            if self.is_chief:
                self._cluster.announce(topology, bytes)
                return
            self._compiler.parameter_servers.pause()
            self._cluster.hear(topology)

        def take_chiefs(variables: Iterable[tf.Variable]) -> None:
            named = {f"keras_{number}": variable for number, variable in enumerate(variables)}
            self._compiler.values.written_alone(named)
            self._compiler.values.broadcast(named)

        return Workers(
            partial(self._function, together=True),
            rank=self.rank,
            num_workers=self.num_workers,
            num_replicas=len(self.resources.replica_devices),
            batch=self._capture_options.batch,
            looks_ahead=self._mode.looks_ahead,
            compare=compare,
            take_chiefs=take_chiefs,
            sync=self._compiler.parameter_servers.sync,
            pull=self._compiler.parameter_servers.directory.pull,
            await_chief=await_chief,
            are_apart=lambda: self._compiler.parameter_servers.are_apart,
        )

    def _compile(self, name: str, captured: CapturedFunction, *, together: bool) -> Program:
        self._require_open("function")
        self._look_for_writers()
        return self._mode.program(name, captured, together=together)

    def _look_for_writers(self) -> None:
        if ChiefWrites.of_process is not None:
            ChiefWrites.of_process.look()

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise AutoDistError(
                f"{what} was used after this AutoDist was closed; make a new one (and compile Keras models again, in "
                "its scope, or outside of it to train them on one device)"
            )


def require_same_arguments(everyone: Mapping[int, bytes]) -> None:
    """Refuse workers whose AutoDist objects were made with different arguments.

    Args:
        everyone: each worker's arguments as JSON, by rank.

    Raises:
        ClusterError: the first argument that differs, and on which worker.
    """
    chief = json.loads(everyone[0])
    for rank, text in sorted(everyone.items()):
        for name, value in json.loads(text).items():
            if value != chief[name]:
                raise ClusterError(
                    f"every worker must make AutoDist with the same arguments; {name} is {chief[name]!r} on the chief, "
                    f"and {value!r} on worker {rank}"
                )
