"""`autodist plan`: what a step sends by closed forms, and the command as a user calls it."""

import re
import shutil
import subprocess
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.diagnostics.plan import Link, Plan, Traffic
from autodist_py.proto.graph_item import Gradient, GraphItem, Variable
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.proto.strategy import Strategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder, build_strategy
from autodist_py.strategy_builders.mixed import Parallax, PerVariable
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from autodist_py.strategy_builders.partitioned import PartitionedAR, ShardedOptimizer, UnevenPartitionedPS
from tests.support.planned import SCRIPT
from tests.support.processes import AUTODIST, ROOT

pytestmark = pytest.mark.first


ITEM = GraphItem(
    graph_def=b"",
    variables=(Variable("dense", "float32", (100, 30)), Variable("table", "float64", (50, 4))),
    gradients=(Gradient("dense", ("g:0",)), Gradient("table", ("i:0", "v:0", "s:0"))),
)
DENSE, ROW, INDEX = 100 * 30 * 4, 4 * 8, 8


def plan_of(builder: StrategyBuilder, workers: int, replicas: int = 1) -> Plan:
    resources = local_resource_spec(workers, replicas)
    return Plan(ITEM, resources, build_strategy(builder, ITEM, resources))


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_ring_sends_each_byte_almost_twice(workers: int) -> None:
    plan = plan_of(AllReduce(), workers)
    ring = {Link(rank, (rank + 1) % workers) for rank in range(workers)}
    assert plan.traffic("dense") == dict.fromkeys(ring, Traffic(2 * (workers - 1) / workers * DENSE))
    assert plan.traffic("table") == dict.fromkeys(ring, Traffic(per_use=(workers - 1) * (ROW + INDEX)))


def test_what_travels_as_dense_goes_round_a_ring_whole() -> None:
    plan = plan_of(AllReduce(sparse_as_dense=True), 3)
    ring = {Link(rank, (rank + 1) % 3) for rank in range(3)}
    assert plan.traffic("table") == dict.fromkeys(ring, Traffic(4 / 3 * 50 * ROW))


def test_one_ring_over_all_replicas_passes_workers_as_often_as_its_members() -> None:
    traffic = plan_of(AllReduce(all_reduce_spec="RING"), 2, 3).traffic("dense")
    assert traffic == dict.fromkeys([Link(0, 1), Link(1, 0)], Traffic(2 * 5 / 6 * DENSE))


def test_what_is_compressed_sends_less() -> None:
    plan = plan_of(AllReduce(compressor="HorovodCompressor"), 2, 2)
    ring = [Link(0, 1), Link(1, 0)]
    assert plan.traffic("dense") == dict.fromkeys(ring, Traffic(DENSE / 2))
    assert plan.traffic("table") == dict.fromkeys(ring, Traffic(per_use=ROW / 4 + INDEX))


DENSE_ELEMENTS = 100 * 30


@pytest.mark.parametrize(
    ("compressor", "nbytes", "times"),
    [
        ("HorovodCompressorEF", 2 * DENSE_ELEMENTS, 4 / 3),
        ("PowerSGDCompressor(rank=2)", 2 * (100 + 30) * 4, 4 / 3),
        ("TopKCompressor", 30 * (4 + 4), 2),
        ("Int8Compressor", DENSE_ELEMENTS + 12 * 4, 2),
    ],
)
def test_three_workers_send_of_a_gradient_what_its_compressor_leaves(
    compressor: str, nbytes: int, times: float
) -> None:
    """Sums go round a ring; what is gathered goes to each of the two others; a server is sent it once."""
    builder = PerVariable({"table": AllReduce()}, default=AllReduce(all_reduce_spec="RING", compressor=compressor))
    traffic = plan_of(builder, 3, 2).traffic("dense")
    ring = {Link(rank, (rank + 1) % 3) for rank in range(3)}
    assert {link: round(one.nbytes) for link, one in traffic.items()} == dict.fromkeys(ring, round(times * nbytes))
    if "PowerSGD" not in compressor:
        served = PerVariable({"table": AllReduce()}, default=PS(compressor=compressor))
        assert plan_of(served, 3).traffic("dense")[Link(1, 0)] == Traffic(nbytes)
        assert plan_of(served, 3).traffic("dense")[Link(0, 1)] == Traffic(DENSE)


@pytest.mark.parametrize("compressor", ["HorovodCompressor(dtype='bfloat16')", "examples.plugin.brief:Brief"])
def test_an_odd_row_of_bfloat16_travels_with_one_number_more(compressor: str) -> None:
    item = replace(ITEM, variables=(ITEM.variables[0], Variable("table", "float64", (50, 3))))
    resources = local_resource_spec(2)
    builder = AllReduce(compressor=compressor)
    plan = Plan(item, resources, build_strategy(builder, item, resources))
    assert plan.traffic("table")[Link(0, 1)].per_use == pytest.approx(4 * 2 + INDEX)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_server_is_sent_gradients_and_sends_values(is_whole: bool) -> None:
    plan = plan_of(PS(local_proxy_variable=is_whole), 3)
    assert plan.traffic("dense") == {link: Traffic(DENSE) for rank in (1, 2) for link in (Link(rank, 0), Link(0, rank))}
    asked, answered = (0, Traffic(50 * ROW)) if is_whole else (INDEX, Traffic(per_row=ROW))
    assert plan.traffic("table") == {
        link: traffic
        for rank in (1, 2)
        for link, traffic in ((Link(rank, 0), Traffic(per_row=asked, per_use=ROW + INDEX)), (Link(0, rank), answered))
    }


def test_a_shard_sends_its_share() -> None:
    resources = ResourceSpec(tuple(NodeSpec(f"127.0.0.{n}", chief=n == 1, network_bandwidth=float(n)) for n in (1, 2)))
    strategy = build_strategy(UnevenPartitionedPS(min_shard_bytes=1), ITEM, resources)
    plan = Plan(ITEM, resources, strategy)
    assert strategy.node("dense").sizes(100) == (33, 67)
    wanted = {Link(1, 0): 0.33 + 0.67, Link(0, 1): 0.67 + 0.33}
    assert {link: round(traffic.nbytes) for link, traffic in plan.traffic("dense").items()} == {
        link: round(share * DENSE) for link, share in wanted.items()
    }
    table = plan.traffic("table")[Link(1, 0)]
    assert (round(table.per_row, 6), round(table.per_use, 6)) == (
        round(17 / 50 * INDEX + 33 / 50 * ROW, 6),
        round(17 / 50 * (ROW + INDEX), 6),
    )
    assert re.search(r"^dense .* PS\(127.0.0.1:CPU:0\) PS\(127.0.0.2:CPU:0\) +- +2 \(33, 67\) +- ", str(plan), re.M)


def test_what_is_used_in_the_place_of_nccl_is_said_with_the_reason() -> None:
    text = str(plan_of(AllReduce(all_reduce_spec="NCCL"), 2))
    assert (
        "instead: all_reduce_spec NCCL runs on GPUs only, not on '127.0.0.1:CPU:0', '127.0.0.2:CPU:0': with "
        "AutoDist(strict=False) RING is used in its place, for 'dense', 'table'; else the program is refused"
    ) in text
    assert "instead" not in str(plan_of(AllReduce(all_reduce_spec="RING"), 2))
    on_gpus = ResourceSpec((NodeSpec("127.0.0.1", chief=True, gpus=(0, 1)),))
    strategy = build_strategy(AllReduce(all_reduce_spec="NCCL"), ITEM, on_gpus)
    assert "instead" not in str(Plan(ITEM, on_gpus, strategy))


@pytest.mark.parametrize("compressor", ["TopKCompressor", "Int8Compressor"])
def test_it_is_said_that_gathers_are_rings_whatever_sums(compressor: str) -> None:
    def text(spec: str, compressor: str = compressor, nodes: int = 2) -> str:
        return str(plan_of(PerVariable({"dense": AllReduce(all_reduce_spec=spec, compressor=compressor)}), nodes))

    assert "instead: what the compressor of 'dense' makes is gathered, not summed, and gathers are rings" in text(
        "NCCL"
    )
    assert "instead: what the compressor of 'dense' makes is gathered" in text("HOROVOD")
    assert "instead" not in text("RING")
    assert "instead" not in text("HOROVOD", "HorovodCompressor")
    assert "instead" not in text("HOROVOD", nodes=1)


def test_what_auto_stands_for_is_said() -> None:
    assert "all_reduce_spec AUTO: RING\n" in str(plan_of(AllReduce(), 2))
    large = replace(ITEM, variables=(Variable("dense", "float32", (2000, 1000)), ITEM.variables[1]))
    plan = replace(plan_of(AllReduce(), 2), item=large)
    assert "all_reduce_spec AUTO: HOROVOD, if every worker has it, else RING\n" in str(plan)
    for other in (plan_of(AllReduce(), 1, 2), plan_of(AllReduce(all_reduce_spec="RING"), 2), plan_of(PS(), 2)):
        assert "all_reduce_spec AUTO" not in str(other)


@pytest.mark.parametrize("builder", [AllReduce(), PSLoadBalancing(), Parallax(), ShardedOptimizer(), PartitionedAR()])
def test_a_worker_alone_sends_nothing(builder: StrategyBuilder) -> None:
    assert plan_of(builder, 1, 2).links() == {}


def test_the_text_has_each_variable_node_and_link_and_what_is_given_up() -> None:
    text = str(plan_of(Parallax(), 2))
    assert re.search(r"^dense +100x30 +12.0 kB +dense +AllReduce\(AUTO\) +0 +1 +- +24.0 kB$", text, re.M)
    assert re.search(
        r"^table +50x4 +1.6 kB +sparse +PS\(127.0.0.1:CPU:0\) +- +1 +- +40 bytes a row \+ 40 bytes a use$", text, re.M
    )
    assert re.search(r"^127.0.0.2 +12.0 kB \+ 8 bytes a row \+ 40 bytes a use +12.0 kB \+ 32 bytes a row$", text, re.M)
    assert re.search(r"^127.0.0.2 -> 127.0.0.1 +12.0 kB \+ 8 bytes a row \+ 40 bytes a use$", text, re.M)
    assert "gives up nothing" in text
    assert "neither a sum nor a mean" in text
    assert "gives up, compared with one device" in str(plan_of(PS(sync=False), 2))


SPEC = "nodes: [{address: 10.0.0.1, gpus: [0, 1], chief: true}, {address: 10.0.0.2}]"


def planned(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "spec.yaml").write_text(SPEC)
    return subprocess.run(
        [*AUTODIST, "plan", *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_script_is_planned_for_nodes_that_are_not_there(tmp_path: Path) -> None:
    ended = planned(tmp_path, "--spec", "spec.yaml", "--save", "strategy.json", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "1 variable, 3 replicas on 2 nodes" in ended.stdout
    assert re.search(r"^weight +3x2 +48 bytes +dense +AllReduce", ended.stdout, re.M)
    assert "10.0.0.1 -> 10.0.0.2" in ended.stdout
    assert "not reached" not in ended.stdout
    assert (
        "Schedule: the communication of a step, in order\n"
        "event FetchResults[RING, level 0, 8 bytes of each of 2] fetches Identity:0\n"
        "event AllReduceBucket[RING, level 1, 48 bytes of each of 2] dense gradients of weight\n"
    ) in ended.stdout
    saved = Strategy.load(tmp_path / "strategy.json")
    assert saved.replicas == ("10.0.0.1:GPU:0", "10.0.0.1:GPU:1", "10.0.0.2:CPU:0")
    assert saved.node("weight").synchronizer == AllReduceSynchronizer()


WIDE = """
import numpy as np, tensorflow as tf
from autodist_py import AutoDist

autodist = AutoDist()
with autodist.scope():
    kernel = tf.Variable(np.ones([400, 500], np.float32), name="kernel")

    @autodist.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ kernel) ** 2)
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

step(np.ones([BATCH, 400], np.float32))
"""


@pytest.mark.parametrize(("batch", "sends"), [(12, "28.8 kB"), (1200, "800.0 kB")])
def test_the_first_batch_says_whether_factors_are_sent(batch: int, sends: str, tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(WIDE.replace("BATCH", str(batch)))
    resources = "nodes:\n  - {address: 10.0.0.1, cpus: [0, 1], chief: true}\n  - {address: 10.0.0.2, cpus: [0]}\n"
    (tmp_path / "two.yaml").write_text(resources)
    ended = subprocess.run(
        [*AUTODIST, "plan", "--spec", "two.yaml", "wide.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ("factors of the gradients of kernel, with Identity:0; " in ended.stdout) == (batch == 12)
    assert re.search(rf"^10\.0\.0\.1 -> 10\.0\.0\.2 +{sends}$", ended.stdout, re.M), ended.stdout


def test_the_command_lines_builder_is_the_one_that_counts(tmp_path: Path) -> None:
    ended = planned(tmp_path, "--spec", "spec.yaml", "--strategy", "PS(staleness=2)", "--save", "s.json", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "event Exchange[SERVER, level 1, 48 bytes of each of 2] with server 0: gradients of weight" in ended.stdout
    wanted = PSSynchronizer("10.0.0.1:CPU:0", staleness=2)
    assert Strategy.load(tmp_path / "s.json").node("weight").synchronizer == wanted


def test_a_compressor_beside_the_script_is_found(tmp_path: Path) -> None:
    """As it is in a run: only the script's process looks for modules in its folder."""
    shutil.copy(ROOT / "examples/plugin/brief/__init__.py", tmp_path / "compressor_of_mine.py")
    builder = "AllReduce(compressor='compressor_of_mine:Brief')"
    ended = planned(tmp_path, "--local", "2", "--strategy", builder, "--save", "mine.json", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "gradients are rounded to bfloat16" in ended.stdout
    assert "compressor_of_mine:Brief" in (tmp_path / "mine.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local", "2", "train.py", "--idle"], "Error: the script came to no training step"),
        (["--local", "2", "--strategy", "PerVariable(builders={'x': 'PS'})", "train.py"], "pattern 'x' matches no"),
        (["--local", "2", "--strategy", "Parallx", "train.py"], "did you mean 'Parallax'"),
        (["train.py"], "Exactly one of --local and --spec"),
    ],
)
def test_what_cannot_be_planned_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    ended = planned(tmp_path, *arguments)
    assert ended.returncode != 0
    assert message in ended.stdout + ended.stderr


SESSION = """
import tensorflow as tf
from autodist_py import AutoDist

autodist = AutoDist()
with tf.Graph().as_default(), autodist.scope():
    x = tf.compat.v1.placeholder(tf.float32, [None, 3])
    weight = tf.compat.v1.get_variable("weight", [3, 2])
    train = tf.compat.v1.train.AdamOptimizer().minimize(tf.reduce_mean(x @ weight))
    with autodist.create_distributed_session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train, {x: [[1, 2, 3]]})
"""
FIT = """
import keras, numpy as np
from autodist_py import AutoDist

with AutoDist().scope():
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("adam", "mse")
model.fit(np.ones([8, 3]), np.ones([8, 2]), verbose=0)
"""


@pytest.mark.parametrize(("script", "variable"), [(SESSION, "weight"), (FIT, "sequential/dense/kernel")])
def test_every_door_can_be_planned(tmp_path: Path, script: str, variable: str) -> None:
    (tmp_path / "other.py").write_text(textwrap.dedent(script))
    ended = planned(tmp_path, "--local", "2", "--strategy", "PS", "other.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(rf"^{variable} +3x2 +24 bytes +dense +PS\(127.0.0.1:CPU:0\)", ended.stdout, re.M)
