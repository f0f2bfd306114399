"""Horovod as the engine of all-reduces: it trains as one device does, ends with the run, and is refused clearly."""

import logging
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from os import environ, kill
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.kernel import horovod_adapter
from autodist_py.kernel.program import Program, Promise
from autodist_py.kernel.verify import verify
from autodist_py.proto.errors import ClusterError, InvalidGraphError, StrategyError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.proto.strategy import Node, Strategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from autodist_py.runtime import horovod
from autodist_py.runtime.cluster import SoloCluster
from autodist_py.strategy_builders.all_reduce import AllReduce
from tests import test_compressed
from tests.cluster_pool import TWO_WORKERS, Cluster, Shape
from tests.cluster_pool import same_on_all_workers as same
from tests.kernel import programs
from tests.kernel.test_synchronize import in_packs, three_layers
from tests.oracle import Batch, Training, compare_function, compare_graph
from tests.oracle_programs import batches, graph_program, hand_written
from tests.runtime.test_cluster import Run

is_installed = pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed: make horovod")

FOUR_REPLICAS = Shape("2-workers-2+2-replicas", (2, 2))
ON_TWO = pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
ON_BOTH = pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, FOUR_REPLICAS], ids=lambda shape: shape.name, indirect=True, scope="module"
)


def horovods_rank() -> tuple[int, int]:
    """Of this process, as Horovod numbers it, and how many there are."""
    from horovod.tensorflow import mpi_ops

    return mpi_ops.rank(), mpi_ops.size()


def launched(strategy: Strategy | None = None) -> Program:
    """A program of dense and sparse gradients for two workers, in order."""
    item = programs.dense_and_sparse()
    by_horovod = programs.all_reduce(item, spec="HOROVOD", chunk_size=1)
    return programs.after("order", item, programs.place(1, 1), strategy or by_horovod)


# -- Training ----------------------------------------------------------------------------------------------------------


def train(optimizer: str, **builder: Any) -> dict[str, np.ndarray]:
    strategy = AllReduce(all_reduce_spec="HOROVOD", **builder)
    model = hand_written("both", optimizer)
    values = compare_function(model, batches("both"), autodist={"strategy_builder": strategy})
    with AutoDist() as autodist:
        assert horovods_rank() == (autodist.rank, 2), "it runs by another engine"
    return values


@is_installed
@ON_BOTH
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("builder", [{}, {"chunk_size": 1}, {"bytes_per_pack": 64}], ids=["group", "each", "packs"])
def test_it_trains_as_one_device_does(cluster: Cluster, optimizer: str, builder: dict[str, int]) -> None:
    same(cluster.run(train, optimizer=optimizer, **builder))


def train_in_session() -> dict[str, np.ndarray]:
    strategy = AllReduce(all_reduce_spec="HOROVOD")
    return compare_graph(graph_program("both", "adam"), batches("both"), autodist={"strategy_builder": strategy})


@is_installed
@ON_TWO
def test_a_session_trains_by_it_as_one_device_does(cluster: Cluster) -> None:
    same(cluster.run(train_in_session))


@is_installed
@ON_TWO
@pytest.mark.parametrize("width", [3, 4])
def test_half_precision_is_that_of_numpy(cluster: Cluster, width: int) -> None:
    builder = AllReduce(all_reduce_spec="HOROVOD", compressor="HorovodCompressor", sparse_as_dense=False)
    same(cluster.run(test_compressed.train, builder=builder, dtype="float16", width=width))


@is_installed
@ON_TWO
@pytest.mark.parametrize("compressor", ["HorovodCompressorEF", "PowerSGDCompressor(rank=2)"])
def test_steps_with_a_compressor_are_those_of_its_model(cluster: Cluster, compressor: str) -> None:
    builder = AllReduce(all_reduce_spec="HOROVOD", compressor=compressor)
    same(cluster.run(test_compressed.by_model, builder=builder, compressor=compressor, steps=3, replicas=(1, 1)))


def descending(autodist: AutoDist) -> tuple[Callable[[Any], Any], tf.Variable]:
    """A step that trains a few weights, and these."""
    weights = tf.Variable(np.ones(3))

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.linalg.matvec(x, weights) ** 2)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))

    return autodist.function(step), weights


def by_both_engines() -> list[np.ndarray]:
    """Weights after steps by Horovod and by AUTO, taken in turns, in one process."""
    objects = [AutoDist(strategy_builder=AllReduce(all_reduce_spec=spec)) for spec in ("HOROVOD", "AUTO")]
    trained = [descending(each) for each in objects]
    x = np.random.default_rng(3).normal(size=(6, 3))
    for _ in range(4):
        for step, _ in trained:
            step(x)
    for each in objects:
        each.close()
    return [weights.numpy() for _, weights in trained]


@is_installed
@ON_TWO
def test_programs_of_both_engines_take_turns_in_one_process(cluster: Cluster) -> None:
    for horovods, rings in cluster.run(by_both_engines):
        np.testing.assert_allclose(horovods, rings, rtol=1e-12)
        assert not np.allclose(horovods, 1.0)


# -- AUTO ------------------------------------------------------------------------------------------------------------


def large(seed: int) -> Training:
    """A step that trains as many bytes as AUTO uses Horovod for within one host, and a few more."""
    random = np.random.default_rng(seed)
    weights, bias = (tf.Variable(random.normal(size=shape)) for shape in ([1000, 1000], [1000]))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ weights) + bias) ** 2)
        for variable, gradient in zip((weights, bias), tape.gradient(loss, [weights, bias]), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return Training(step, lambda: {"weights": weights, "bias": bias})


WIDE = tuple((rows,) for rows in np.random.default_rng(7).normal(size=(2, 8, 1000)))
"""Two batches for it."""


def small(seed: int) -> Training:
    """A step that trains few bytes."""
    return hand_written("dense", "sgd")(seed)


def train_by_auto(
    build: Callable[[int], Training] = large,
    data: Sequence[Batch] = WIDE,
    patch: Callable[[pytest.MonkeyPatch, int], None] | None = None,
) -> tuple[list[int], dict[str, Any]]:
    """How many numbers are in each all-reduce by Horovod of steps with AUTO, and the trained values.

    Args:
        build: makes what is trained.
        data: the steps' batches.
        patch: changes what a worker, by its rank, finds of Horovod.
    """
    carried: list[int] = []
    by_horovod = horovod_adapter.all_reduce

    def noted(value: tf.Tensor, name: str) -> tf.Tensor:
        carried.append(value.shape.num_elements())
        return by_horovod(value, name)

    with AutoDist() as autodist, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(horovod_adapter, "all_reduce", noted)
        if patch is not None:
            patch(monkeypatch, autodist.rank)
        return carried, compare_function(build, data)


@is_installed
@ON_BOTH
def test_auto_trains_many_bytes_by_horovod_within_one_host_as_one_device_does(cluster: Cluster) -> None:
    results = cluster.run(train_by_auto)
    for carried, _ in results:
        assert sum(carried) == 1_001_000
    same([values for _, values in results])


@is_installed
@ON_TWO
def test_auto_trains_few_bytes_by_a_ring(cluster: Cluster) -> None:
    assert [carried for carried, _ in cluster.run(train_by_auto, build=small, data=batches("dense"))] == [[], []]


def missing_on_1(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 1:
        patch.setitem(sys.modules, "horovod", None)


def started_by_the_script_on_1(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 1:
        library = horovod_adapter.library()
        patch.setattr(library, "is_initialized", lambda: True)
        patch.setattr(library, "rank", lambda: 0)
        patch.setattr(library, "size", lambda: 1)


def without_a_name_on_0(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 0:
        patch.setattr(horovod_adapter.library(), "is_initialized", lambda: False)
        patch.setattr(socket, "gethostname", lambda: "pluto.invalid")


@is_installed
@ON_TWO
@pytest.mark.parametrize("patch", [missing_on_1, started_by_the_script_on_1, without_a_name_on_0])
def test_auto_does_without_where_one_worker_cannot_start_it(cluster: Cluster, patch: Callable[..., None]) -> None:
    results = cluster.run(train_by_auto, patch=patch)
    assert [carried for carried, _ in results] == [[], []]
    same([values for _, values in results])


def asked_for_auto() -> int:
    """How often workers ask each other whether they can start it, for one program."""
    asked: list[str] = []
    obstacle = horovod.obstacle

    def noted(cluster: Any, resources: ResourceSpec, key: Callable[[str], str]) -> Any:
        asked.append(key("asked"))
        return obstacle(cluster, resources, key)

    carried, _ = train_by_auto(patch=lambda patch, _: patch.setattr(horovod, "obstacle", noted))
    assert carried, "it runs by another engine"
    return len(asked)


@is_installed
@ON_TWO
def test_workers_ask_once_whether_it_can_start(cluster: Cluster) -> None:
    assert cluster.run(asked_for_auto) == [1, 1]


def warned_of_a_timeline(folder: Path) -> list[str]:
    """What is said of programs, where there is to be a timeline."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("autodist_py.compiler")
    log.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AUTODIST_TIMELINE", str(folder / "trace.json"))
            for spec in ("HOROVOD", "RING"):
                with AutoDist(strategy_builder=AllReduce(all_reduce_spec=spec)) as autodist:
                    step, _ = descending(autodist)
                    step(np.ones([4, 3]))
    finally:
        log.removeHandler(handler)
    return said


@is_installed
@ON_TWO
def test_that_a_timeline_is_without_it_is_said(cluster: Cluster, tmp_path: Path) -> None:
    of_chief, of_other = cluster.run(warned_of_a_timeline, folder=tmp_path)
    assert [message.partition(": ")[2] for message in of_chief] == [
        "TensorFlow's profiler does not see Horovod's all-reduces, so the timeline is without them; RING's are there, "
        "with all_reduce_spec RING"
    ]
    assert of_other == []


class Started:
    """Horovod as worker 1 of two meets it, and the cluster that it is started in; both note what is done."""

    rank, num_workers, is_chief, heartbeat_timeout = 1, 2, False, 60.0

    def __init__(self) -> None:
        self.done: list[str] = []
        self.variables: dict[str, str] = {}
        self.shutdown = lambda: None

    def compare(self, key: str, value: bytes) -> dict[int, bytes]:
        self.done.append(key)
        return {0: b"127.0.0.1:1234" if key == "rendezvous" else value, 1: value}

    def barrier(self, key: str) -> None:
        self.done.append(key)

    def on_failure(self, callback: Callable[[str], None]) -> Callable[[], None]:
        return lambda: None

    def is_initialized(self) -> bool:
        return "init" in self.done

    def init(self) -> None:
        self.done.append("init")
        self.variables = {name: value for name, value in environ.items() if name.startswith("HOROVOD_")}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """As it is after `start`."""
    both: Any = Started()
    monkeypatch.setattr(horovod_adapter, "library", lambda: both)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.2")
    nodes = (NodeSpec("127.0.0.1", chief=True), NodeSpec("127.0.0.2"))
    horovod.start(both, ResourceSpec(nodes), lambda word: word)
    return both


def test_it_starts_when_every_worker_is_about_to(started: Started) -> None:
    assert started.done == ["rendezvous", "init", "horovod started"]
    assert started.variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "1234"


def test_it_waits_for_a_silent_worker_longer_than_its_heartbeat_may_be_missing(started: Started) -> None:
    assert int(started.variables["HOROVOD_GLOO_TIMEOUT_SECONDS"]) == started.heartbeat_timeout + 1


# -- The graph ---------------------------------------------------------------------------------------------------------


@is_installed
def test_dense_gradients_travel_by_horovod_and_the_rest_as_ever() -> None:
    program = launched()
    ops = {launch.what: program.graph.nodes[op].op for launch in program.launches for op in launch.ops}
    assert {op for what, op in ops.items() if what.startswith("dense gradients")} == {"HorovodAllreduce"}
    assert {op for what, op in ops.items() if not what.startswith("dense gradients")} == {"CollectiveGatherV2"}


@is_installed
def test_a_gradient_that_is_larger_than_a_buffer_travels_whole() -> None:
    item = three_layers(side=200)
    program = programs.after("order", item, programs.place(1, 1), in_packs(item, bytes_per_pack=8, spec="HOROVOD"))
    by_name = [(launch.what, len(launch.ops)) for launch in program.launches if launch.by_name]
    assert by_name == [(f"dense gradients of w{index}", 1) for index in (2, 1, 0)]


@is_installed
def test_workers_find_each_others_parts_by_names_that_are_equal_and_of_one_program() -> None:
    item = programs.two_stages(stages=3)
    strategy = programs.all_reduce(item, spec="HOROVOD", chunk_size=1)

    def names(worker: int, first_instance_key: int) -> list[str]:
        place = programs.place(2, 1, 3, worker=worker)
        program = programs.after("order", item, place, strategy, first_instance_key=first_instance_key)
        return [op for launch in program.launches if launch.by_name for op in launch.ops]

    assert names(0, 1) == names(1, 1) == names(2, 1)
    assert len(set(names(0, 1))) == 3
    assert not set(names(0, 1)) & set(names(0, 40))


@is_installed
def test_its_all_reduces_wait_for_no_other_collective_and_are_run_whatever_needs_them() -> None:
    program = launched()
    assert Promise.ORDERED in program.holds
    named = {op for launch in program.launches if launch.by_name for op in launch.ops}
    collectives = {op for launch in program.launches for op in launch.ops}
    assert named
    assert named < collectives
    for op in named:
        assert not {f"^{other}" for other in collectives} & set(program.graph.nodes[op].input)
    assert named <= set(program.run_ops)
    with pytest.raises(InvalidGraphError, match=r"is not among the ops to run"):
        verify(replace(program, run_ops=tuple(set(program.run_ops) - named)))


# -- The end -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import time
import numpy as np
from autodist_py import AutoDist
from autodist_py.strategy_builders.all_reduce import AllReduce

with AutoDist(strategy_builder=AllReduce(all_reduce_spec="HOROVOD", timeout_seconds=TIMEOUT)) as autodist:
    import tensorflow as tf
    weights = tf.Variable(np.ones(1_000_000, np.float32), name="weights")

    @autodist.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x) * tf.reduce_sum(weights)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))

    for number in range(STEPS):
        if number == SLEEPS and autodist.rank == 1:
            time.sleep(60)
        try:
            step(np.ones([4], np.float32))
        except Exception as error:
            print("raised", type(error).__name__, error, flush=True)
            raise
        if number == 9:
            print("training", flush=True)
print("over", flush=True)
"""

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs = []
    (tmp_path / "resources.yaml").write_text(TWO_WORKERS.resource_spec())

    def start_run(*, steps: int = 10**9, timeout: float = 0.0, sleeps: int = 10**9, **environment: str) -> Run:
        script = SCRIPT.replace("STEPS", str(steps)).replace("TIMEOUT", str(timeout)).replace("SLEEPS", str(sleeps))
        runs.append(Run(tmp_path, script, AUTODIST_RESOURCE_SPEC=str(tmp_path / "resources.yaml"), **environment))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()


@is_installed
@pytest.mark.alone
def test_a_script_that_ends_well_ends_at_once(start: Start) -> None:
    run = start(steps=20)
    run.wait_for("over", 2)
    assert run.end(10.0) == 0, run.text
    assert run.causes == {}


WAITED = (
    r", while worker 0 \(127.0.0.1\) (waited for it to combine|was in a step that combines) dense gradients of weights"
)


@is_installed
@pytest.mark.alone
@pytest.mark.parametrize(
    ("number", "timeout", "words"),
    [
        (signal.SIGKILL, 0.0, "ended .*: killed by SIGKILL; see its output above"),
        (signal.SIGSTOP, 2.0, "stopped answering .*: no heartbeat for 2 s, with timeout_seconds 2"),
        pytest.param(signal.SIGSTOP, 0.0, "stopped answering .*: no heartbeat for 5 s", marks=pytest.mark.slow),
    ],
    ids=["killed", "stopped-timeout", "stopped"],
)
def test_a_worker_that_is_killed_or_stands_still_ends_the_run_with_one_cause(
    start: Start, number: signal.Signals, timeout: float, words: str
) -> None:
    run = start(timeout=timeout)
    run.wait_for("training", 2)
    began = time.monotonic()
    kill(run.pids[1], number)
    assert run.end(20.0) == 1, run.text
    assert time.monotonic() - began < 12.0, run.text
    assert re.fullmatch(rf"worker 1 \(127.0.0.2\) {words}{WAITED}", run.causes[0]), run.text
    if not timeout:  # With one the grace period may end the process first.
        assert f"raised WorkerFailedError {run.causes[0]}" in run.lines, run.text


@is_installed
@pytest.mark.slow
@pytest.mark.alone
def test_a_step_with_a_timeout_raises_for_a_silent_worker_where_the_grace_period_is_longer_than_the_heartbeat(
    start: Start,
) -> None:
    run = start(timeout=2.0, AUTODIST_EXIT_GRACE="6")
    run.wait_for("training", 2)
    kill(run.pids[1], signal.SIGSTOP)
    assert run.end(20.0) == 1, run.text
    assert "with timeout_seconds 2" in run.causes[0]
    assert f"raised WorkerFailedError {run.causes[0]}" in run.lines, run.text


@is_installed
@pytest.mark.slow
@pytest.mark.alone
def test_a_step_raises_when_a_worker_lives_but_does_not_come(start: Start) -> None:
    run = start(timeout=2.0, sleeps=30)
    assert run.end(60.0) == 1, run.text
    words = (
        "kept others waiting at step 30: 2 s after another it has not begun step 31 of all workers, with "
        "timeout_seconds 2"
    )
    assert re.fullmatch(rf"worker 1 \(127.0.0.2\) {words}{WAITED}", run.causes[0]), run.text
    assert f"raised WorkerFailedError {run.causes[0]}" in run.lines, run.text


@is_installed
@pytest.mark.alone
@pytest.mark.slow
def test_a_chief_that_is_killed_ends_the_others(start: Start) -> None:
    run = start()
    run.wait_for("training", 2)
    kill(run.pids[0], signal.SIGKILL)
    assert run.end(10.0) == -signal.SIGKILL, run.text


# -- Refusals ----------------------------------------------------------------------------------------------------------

WAY_OUT = r".*; build it for this TensorFlow \(`make horovod` in the project's folder\), or use .* AUTO or RING"


def test_a_strategy_that_asks_for_it_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(StrategyError, match=r"HOROVOD needs Horovod, which is not installed" + WAY_OUT):
        launched()


def test_a_strategy_that_asks_for_one_of_another_tensorflow_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    for metadata, found in (('{"tensorflow": "2.4.0"}', "2.4.0"), ("{}", "none")):
        (tmp_path / "horovod" / "metadata.json").write_text(metadata)
        words = rf"built for this TensorFlow. Received: one for TensorFlow {found}, beside TensorFlow {tf.__version__}"
        with pytest.raises(StrategyError, match=words + WAY_OUT):
            launched()
    (tmp_path / "horovod" / "metadata.json").unlink()
    with pytest.raises(StrategyError, match="Received: one for TensorFlow none"):
        launched()


@pytest.mark.parametrize("metadata", ["{", "[]"])
def test_one_whose_metadata_cannot_be_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, metadata: str
) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "metadata.json").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    with pytest.raises(StrategyError, match=r"whose metadata.json cannot be read: .*" + WAY_OUT):
        horovod_adapter.library()


@pytest.mark.parametrize("error", ["OSError('no such symbol')", "AttributeError('no such symbol')"])
def test_one_that_cannot_be_loaded_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str) -> None:
    (tmp_path / "horovod" / "tensorflow").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "tensorflow" / "__init__.py").write_text(f"raise {error}")
    (tmp_path / "horovod" / "metadata.json").write_text(f'{{"tensorflow": "{tf.__version__}"}}')
    monkeypatch.syspath_prepend(tmp_path)
    for name in {"horovod", *(name for name in sys.modules if name.partition(".")[0] == "horovod")}:
        monkeypatch.setitem(sys.modules, name, None)  # So that it is afterwards as before, also where it is not there.
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(StrategyError, match="cannot be loaded: no such symbol" + WAY_OUT):
        horovod_adapter.library()


@is_installed
@pytest.mark.parametrize(
    ("address", "found", "words"),
    [
        ("127.0.0.1", None, r"resolves its own name. Received: 'pluto', .*; add the line '127.0.0.1 pluto'"),
        ("10.9.8.7", "127.0.1.1", r"others reach. Received: 'pluto' at 127.0.1.1; add the line '10.9.8.7 pluto'"),
        ("10.9.8.7", "10.9.8.6", r"others reach. Received: 'pluto' at 10.9.8.6; add the line '10.9.8.7 pluto'"),
    ],
    ids=["unknown", "loopback", "of-another-host"],
)
def test_a_host_whose_own_name_does_not_serve_is_refused_before_horovod_ends_its_process(
    monkeypatch: pytest.MonkeyPatch, address: str, found: str | None, words: str
) -> None:
    def resolve(*_: Any, **__: Any) -> list[Any]:
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: "pluto")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    obstacle = horovod.obstacle(SoloCluster(), ResourceSpec((NodeSpec(address),)), str)
    assert isinstance(obstacle, ClusterError)
    assert re.search(rf"^worker 0 \({address}\): Horovod needs a host .*{words}", str(obstacle))


@is_installed
def test_a_chief_at_whose_address_the_rendezvous_cannot_listen_is_refused() -> None:
    obstacle = horovod.obstacle(SoloCluster(), ResourceSpec((NodeSpec("::1"),)), str)
    assert isinstance(obstacle, ClusterError)
    assert re.search(r"^worker 0 \(::1\): .* the chief's IPv4 address. Received: ::1: .* AUTO or RING", str(obstacle))


@is_installed
def test_a_rendezvous_that_cannot_listen_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_adapter.library(), "is_initialized", lambda: False)
    words = r"rendezvous listens at the chief's IPv4 address. Received: 192.0.2.1, \[Errno \d+\] .*; Give the chief one"
    with pytest.raises(ClusterError, match=words):
        horovod.start(SoloCluster(), ResourceSpec((NodeSpec("192.0.2.1"),)), str)


def test_what_it_does_not_carry_is_refused_by_the_variables_name() -> None:
    synchronizer = AllReduceSynchronizer("HOROVOD", "HorovodCompressor(dtype='bfloat16')")
    names = ("a", "b", "half", "table")
    strategy = Strategy(tuple(Node(name, synchronizer) for name in names), ("127.0.0.1:CPU:0",))
    words = r"variable 'a': its gradient travels as bfloat16, which Horovod does not carry; it carries float16, float32"
    with pytest.raises(StrategyError, match=words):
        launched(strategy)


def missing_on_worker_1() -> str:
    strategy = AllReduce(all_reduce_spec="HOROVOD")
    with AutoDist(strategy_builder=strategy) as autodist, pytest.MonkeyPatch.context() as patch:
        if autodist.rank == 1:
            patch.setitem(sys.modules, "horovod", None)
        step, _ = descending(autodist)
        with pytest.raises(StrategyError) as raised:
            step(np.ones([4, 3]))
    return str(raised.value)


@is_installed
@ON_TWO
def test_where_one_worker_lacks_it_all_are_told_which(cluster: Cluster) -> None:
    for told in cluster.run(missing_on_worker_1):
        assert re.match(r"worker 1 \(127.0.0.2\): all_reduce_spec HOROVOD needs Horovod, which is not installed", told)
