"""How long capturing and compiling take, stage by stage, on a step of about 10,000 ops.

    python -m benchmarks.compile_time [--ops 10000] [--replicas 1 2 4 8] [--chunk-size 128] [--clock wall]
    python -m benchmarks.compile_time --variables 2000 [--compressor NoneCompressor HorovodCompressor] [--rounds 1]

The step is a deep MLP trained by a hand-written Adam with a clipped global norm. With --variables it is one of so many
variables, trained by plain SGD on two workers of one replica each; then the time of "strategy" and "compile" counts,
and the graph is not imported. "own" is what autodist_py and the
tracing of its fragments cost: all time but "trace" (the user's own code, which TensorFlow traces for any
`tf.function`), "import" (TensorFlow reads the compiled graph) and "function" (it makes a function of what it read).

Limits (for 8 local replicas, on 2 cores): 20 s in all, own less than 5 s; and cost grows linearly.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from autodist_py import tf_adapter as runtime_adapter
from autodist_py.capture import tf_adapter
from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.function import CapturedFunction
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.pipeline import compile
from autodist_py.kernel.program import Program
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.program.executor import Executor
from autodist_py.program.step_function import DistributedFunction
from autodist_py.program.step_function import Program as CompiledStep
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import build_strategy
from benchmarks.layered_steps import WIDTH, deep_mlp, layers_of, many_variables

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
LIMIT_TOTAL = 20.0
LIMIT_OWN = 5.0


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds by stage, in the order in which they ran, and the sizes of the graph before and after."""

    seconds: dict[str, float]
    captured_ops: int
    compiled_ops: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def own(self) -> float:
        """Everything but what TensorFlow takes to trace the user's code, to import the program, and to register it."""
        return self.total - sum(self.seconds[name] for name in ("trace", "import", "function"))


class Stopwatch:
    """Seconds by stage, by the clock given."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The time within this context is that of the stage `name`, less what stages inside it took."""
        start, others = self.clock(), sum(self.seconds.values())
        yield
        inside = sum(self.seconds.values()) - others
        self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - start - inside

    @contextmanager
    def calls(self, owner: Any, attribute: str, name: str) -> Iterator[None]:
        """Within this context, the time in calls of the function `owner.attribute` is that of the stage `name`."""
        original = getattr(owner, attribute)

        def function(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return original(*args, **kwargs)

        with tf_adapter.patched(owner, attribute, function):
            yield


class PassTimes:
    """An observer that notes how long each pass took, its verification included."""

    def __init__(self, watch: Stopwatch):
        self._watch = watch
        self._last = watch.clock()

    def __call__(self, position: int, name: str, program: Program) -> None:
        now = self._watch.clock()
        self._watch.seconds[f"pass {name}"] = now - self._last
        self._last = now


def local_topology(replicas: int) -> Topology:
    return Topology(0, tuple(Replica(index, 0, f"/device:CPU:{index}") for index in range(replicas)))


def two_workers() -> Topology:
    return Topology(0, tuple(Replica(rank, rank, "/device:CPU:0") for rank in range(2)))


def measure_compilation(captured: CapturedFunction, compressor: str, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of making a strategy for two workers, and of compiling the step by it for the first of them."""
    resources = ResourceSpec((NodeSpec("10.0.0.1", chief=True), NodeSpec("10.0.0.2")))
    watch = Stopwatch(clock)
    with watch.stage("strategy"):
        strategy = build_strategy(AllReduce(compressor=compressor), captured.item, resources)
    with watch.stage("compile"):
        compile(captured.item, strategy, two_workers())
    return watch.seconds


def _not_compiled(name: str, captured: CapturedFunction) -> CompiledStep:
    raise NotImplementedError("the step is only captured")


def captured_step(step: Callable[..., Any], x: tf.Tensor) -> CapturedFunction:
    distributed = DistributedFunction(step, _not_compiled, name="step", options=CaptureOptions(), batched=None)
    return distributed.captured(x)


def measure(
    step: Callable[..., Any],
    replicas: int,
    *,
    chunk_size: int = 128,
    spec: str = "AUTO",
    clock: Callable[[], float] = time.perf_counter,
) -> Stages:
    """Capture and compile `step` for so many local replicas, and import the program; nothing is run."""
    watch = Stopwatch(clock)
    with watch.calls(tf_adapter, "trace", "trace"), watch.stage("capture"):
        captured = captured_step(step, tf.ones([16, WIDTH]))
    resources = ResourceSpec((NodeSpec("127.0.0.1", cpus=tuple(range(replicas))),))
    with watch.stage("strategy"):
        strategy = build_strategy(AllReduce(chunk_size=chunk_size, all_reduce_spec=spec), captured.item, resources)
    with watch.stage("compile, rest"):
        # The time of the first pass has the analysis of the captured graph in it.
        program = compile(captured.item, strategy, local_topology(replicas), observers=[PassTimes(watch)])
    # Every replica is given the user's own variables, since the program is not run.
    variables = {(bound.variable, bound.replica): captured.variables[bound.variable] for bound in program.variables}
    c_api, context = vars(runtime_adapter)["c_api"], vars(runtime_adapter)["context"].context()
    with (
        watch.calls(c_api, "TF_GraphImportGraphDefWithResults", "import"),
        watch.calls(c_api, "TF_GraphToFunction_wrapper", "function"),
        watch.calls(c_api, "TF_DeleteFunction", "function"),
        watch.calls(context, "add_c_function", "function"),
        watch.stage("executor, rest"),
    ):
        Executor(program, variables, captured.state)
    captured_ops = len(GraphView(tf.compat.v1.GraphDef.FromString(captured.item.graph_def)).nodes)
    return Stages(watch.seconds, captured_ops, len(program.graph.nodes))


def table(results: dict[int, Stages]) -> str:
    names = list(dict.fromkeys(name for stages in results.values() for name in stages.seconds))
    rows = [("seconds for local replicas:", *(str(replicas) for replicas in results))]
    rows += [(name, *(f"{one.seconds.get(name, 0.0):.2f}" for one in results.values())) for name in names]
    rows.append(("total", *(f"{one.total:.2f}" for one in results.values())))
    rows.append(("own", *(f"{one.own:.2f}" for one in results.values())))
    rows.append(
        ("own per 1,000 compiled ops", *(f"{1000 * one.own / one.compiled_ops:.3f}" for one in results.values()))
    )
    rows.append(("ops captured", *(str(one.captured_ops) for one in results.values())))
    rows.append(("ops compiled", *(str(one.compiled_ops) for one in results.values())))
    return "\n".join(f"{row[0]:<28}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows)


def compilation_table(variables: int, compressors: Sequence[str], rounds: int, clock: Callable[[], float]) -> str:
    """The fastest of so many rounds, by compressor."""
    measure_compilation(captured_step(many_variables(4), tf.ones([16, WIDTH])), compressors[0], clock)
    captured = captured_step(many_variables(variables), tf.ones([16, WIDTH]))
    rows = []
    for compressor in compressors:
        seconds = [measure_compilation(captured, compressor, clock) for _ in range(rounds)]
        fastest = min(seconds, key=lambda one: sum(one.values()))
        rows.append((compressor, *(f"{one:.2f}" for one in (*fastest.values(), sum(fastest.values())))))
    header = (f"{variables} variables, 2 workers", "strategy", "compile", "sum")
    return "\n".join(f"{row[0]:<32}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in (header, *rows))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=10_000, help="ops of the captured graph, at least")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8], help="local replicas to compile for")
    parser.add_argument("--chunk-size", type=int, default=128, help="variables to a group")
    parser.add_argument("--spec", default="AUTO", choices=["AUTO", "RING"], help="all_reduce_spec")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: this process's time, on a busy machine")
    parser.add_argument("--check", action="store_true", help="fail when 8 replicas take longer than the limits")
    parser.add_argument("--variables", type=int, help="measure a step of so many variables on two workers instead")
    parser.add_argument(
        "--compressor", nargs="+", default=["NoneCompressor", "HorovodCompressor"], help="see AllReduce"
    )
    parser.add_argument("--rounds", type=int, default=1, help="with --variables: the fastest counts")
    options = parser.parse_args(arguments)
    if options.variables:
        print(compilation_table(options.variables, options.compressor, options.rounds, CLOCKS[options.clock]))
        return 0
    measure(deep_mlp(2), 2)  # TensorFlow loads what it needs when it is first used.
    step = deep_mlp(layers_of(options.ops))
    results = {}
    for replicas in options.replicas:
        clock = CLOCKS[options.clock]
        results[replicas] = measure(step, replicas, chunk_size=options.chunk_size, spec=options.spec, clock=clock)
    print(table(results))
    largest = results.get(8)
    if options.check and largest and (largest.total > LIMIT_TOTAL or largest.own > LIMIT_OWN):
        print(f"over the limits: {LIMIT_TOTAL} s in all, {LIMIT_OWN} s own", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
