"""Who trains a workload on several hosts: autodist_py under a builder, tf.distribute, Horovod, torch, or one device.

Each keeps to the way its own documentation shows, in a `tf.function`, with the settings it has by itself.
"""

import importlib
import importlib.util
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from autodist_py import AutoDist, distribute
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from benchmarks.training_process import TORCH
from benchmarks.workloads import WORKLOADS, Workload, descend

INTRA_OP_THREADS = 1
INTER_OP_THREADS = 4
CONNECT_SECONDS = 120.0

Step = Callable[[int], Any]
"""Trains on the batch of that number; the loss of it, or of this worker's part of it: a number, or a scalar tensor."""

Trainer = Callable[[Workload, "Worker"], Step]


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of several that train together, one a host; `port` is free on each of them."""

    rank: int
    addresses: Sequence[str]
    port: int

    @property
    def endpoints(self) -> list[str]:
        return [f"{address}:{self.port}" for address in self.addresses]


@dataclass(frozen=True, slots=True)
class System:
    """How a worker trains, and what its process needs.

    Attributes:
        train: makes the step.
        is_peer: it is what autodist_py is compared with.
        is_ours: it is autodist_py.
        is_exact: all that its gradients hold travels.
        is_alone: one host trains; the others idle.
        works_when_idle: its threads do not rest between steps.
        environment: of the process of that worker, from before it starts.
        workloads: to which ones it applies; empty: to all.
        link: the only one over which it is run; empty: it is run over all.
    """

    train: Trainer
    is_peer: bool = False
    is_ours: bool = False
    is_exact: bool = True
    is_alone: bool = False
    works_when_idle: bool = False
    environment: Callable[[Worker], Mapping[str, str]] = field(default=lambda _: {})
    workloads: frozenset[str] = frozenset()
    link: str = ""

    def applies_to(self, workload: str) -> bool:
        return not self.workloads or workload in self.workloads

    def runs_over(self, link: str) -> bool:
        return not self.link or link == self.link


def set_threads() -> None:
    """The same for all; before TensorFlow does anything else."""
    tf.config.threading.set_intra_op_parallelism_threads(INTRA_OP_THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(INTER_OP_THREADS)


def missing(system: str) -> str | None:
    """Why the system cannot be run here; None: it can."""
    if system in (HOROVOD, BY_HOROVOD) and importlib.util.find_spec("horovod") is None:
        return "horovod is not installed"
    if system == TORCH and importlib.util.find_spec("torch") is None:
        return "torch is not installed: see benchmarks/torch_models.py"
    return None


def _over(batches: Sequence[Sequence[Any]], step: Callable[..., tf.Tensor]) -> Step:
    tensors = [tuple(map(tf.constant, batch)) for batch in batches]
    return lambda number: step(*tensors[number % len(tensors)])


def _own_parts(workload: Workload, worker: Worker) -> list[Sequence[Any]]:
    return [workload.part(batch, worker.rank) for batch in workload.batches(len(worker.addresses))]


# --- one device -------------------------------------------------------------------------------------------------------


def one_device(workload: Workload, worker: Worker) -> Step:
    """On one worker's part of each batch, with nobody else."""
    step = tf.function(workload.model().step)
    return _over(_own_parts(workload, worker), step)


# --- autodist_py ------------------------------------------------------------------------------------------------------


def autodist(builder: str, bandwidth: float = 1.0) -> Trainer:
    """Under that builder. Every worker is given the whole batch, and takes its part; Gbit/s as a spec states them."""

    def train(workload: Workload, worker: Worker) -> Step:
        step = _autodist(builder, worker, bandwidth).function(workload.model().step)
        return _over(workload.batches(len(worker.addresses)), step)

    return train


def _autodist(builder: str, worker: Worker, bandwidth: float = 1.0) -> AutoDist:
    nodes = tuple(
        NodeSpec(address, chief=rank == 0, network_bandwidth=bandwidth) for rank, address in enumerate(worker.addresses)
    )
    return AutoDist(ResourceSpec(nodes), builder, seed=1)


_PATIENCE = {"AUTODIST_JOIN_TIMEOUT": "600", "AUTODIST_HEARTBEAT_TIMEOUT": "60"}
"""Many processes start at once, and wait for their turn."""


def _autodist_environment(worker: Worker) -> Mapping[str, str]:
    own = {"AUTODIST_LAUNCH": "none", "AUTODIST_COORDINATOR_PORT": str(worker.port), **_PATIENCE}
    if worker.rank:
        own |= {"AUTODIST_RANK": str(worker.rank), "AUTODIST_COORDINATOR": worker.endpoints[0]}
    return own


def _ours(builder: str, *workloads: str, is_exact: bool = True) -> System:
    return System(
        autodist(builder),
        is_ours=True,
        is_exact=is_exact,
        environment=_autodist_environment,
        workloads=frozenset(workloads),
    )


# --- tf.distribute ----------------------------------------------------------------------------------------------------


def multi_worker_mirrored(workload: Workload, worker: Worker) -> Step:
    """`tf.distribute.MultiWorkerMirroredStrategy` by RING."""
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return _replica_function(tf.distribute.MultiWorkerMirroredStrategy(communication_options=options), workload, worker)


def compiled_mirrored(workload: Workload, worker: Worker) -> Step:
    """The same program, under the strategy of `autodist_py.distribute`."""
    return _replica_function(distribute.MultiWorkerMirroredStrategy(), workload, worker)


def compiled_by(builder: str) -> Trainer:
    """The same program, its variables where the builder has them."""

    def train(workload: Workload, worker: Worker) -> Step:
        return _replica_function(distribute.AutoDistStrategy(_autodist(builder, worker)), workload, worker)

    return train


def _replica_function(strategy: tf.distribute.Strategy, workload: Workload, worker: Worker) -> Step:
    """Gradients are reduced in the replica, as optimizers do."""
    with strategy.scope():
        model = workload.model()

    def replica_step(*batch: tf.Tensor) -> tf.Tensor:
        loss, gradients = model.gradients(*batch)
        context = tf.distribute.get_replica_context()
        means = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        context.merge_call(update, args=(means,))
        return loss

    def update(of: tf.distribute.Strategy, means: Sequence[Any]) -> None:
        for variable, mean in zip(model.variables, means, strict=True):
            of.extended.update(variable, descend, args=(mean,))

    step = tf.function(lambda *batch: strategy.run(replica_step, args=batch))
    return _over(_own_parts(workload, worker), step)


def _tf_config(worker: Worker) -> Mapping[str, str]:
    cluster = {"cluster": {"worker": worker.endpoints}, "task": {"type": "worker", "index": worker.rank}}
    return {"TF_CONFIG": json.dumps(cluster)}


def _compiled_environment(worker: Worker) -> Mapping[str, str]:
    return {**_tf_config(worker), **_PATIENCE}


# --- Horovod ----------------------------------------------------------------------------------------------------------


def horovod(workload: Workload, worker: Worker) -> Step:
    """`horovod.tensorflow` over Gloo; what its launcher does otherwise, rank 0 does here."""
    if worker.rank == 0:
        _serve_rendezvous(worker)
    else:
        _wait_for(worker.addresses[0], worker.port)
    import horovod.tensorflow as hvd  # It reads the environment as it is imported.

    hvd.init()
    model = workload.model()

    def step(*batch: tf.Tensor) -> tf.Tensor:
        loss, gradients = model.gradients(*batch)
        for variable, gradient in zip(model.variables, map(hvd.allreduce, gradients), strict=True):
            descend(variable, gradient)
        return loss

    return _over(_own_parts(workload, worker), tf.function(step))


def _serve_rendezvous(worker: Worker) -> None:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer(("", worker.port), RendezvousHandler, 0)
    server.init(get_host_assignments(parse_hosts(",".join(f"{address}:1" for address in worker.addresses)), 1))
    threading.Thread(target=server.serve_forever, daemon=True).start()


def _wait_for(address: str, port: int) -> None:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _horovod_environment(worker: Worker) -> Mapping[str, str]:
    rank, size = str(worker.rank), str(len(worker.addresses))
    return {
        "HOROVOD_HOSTNAME": worker.addresses[worker.rank],
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": rank,
        "HOROVOD_CROSS_SIZE": size,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": worker.addresses[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(worker.port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "eth0",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "86400",  # The time for which it is stopped counts.
    }


# --- torch ------------------------------------------------------------------------------------------------------------


def torch_ddp(workload: Workload, worker: Worker) -> Step:
    """`torch.nn.parallel.DistributedDataParallel` over Gloo, on the same model of PyTorch's layers."""
    torch_models = importlib.import_module("benchmarks.torch_models")
    parts, threads = _own_parts(workload, worker), (INTRA_OP_THREADS, INTER_OP_THREADS)
    return torch_models.distributed_step(workload, parts, worker.rank, worker.addresses, worker.port, threads)


ALONE, HOROVOD = "one device", "Horovod"
BY_HOROVOD = "AllReduce, HOROVOD"
COMPILED = "tf.distribute, compiled"

SYSTEMS: Mapping[str, System] = {
    ALONE: System(one_device, is_alone=True),
    "MultiWorkerMirrored": System(multi_worker_mirrored, is_peer=True, environment=_tf_config),
    # Its threads of different hosts talk to each other a thousand times a second, also between steps.
    HOROVOD: System(
        horovod,
        is_peer=True,
        environment=_horovod_environment,
        works_when_idle=True,
        workloads=frozenset(WORKLOADS) - {"resnet"},  # It has no such normalization for Keras 3.
    ),
    TORCH: System(
        torch_ddp,
        is_peer=True,
        environment=lambda _: {"GLOO_SOCKET_IFNAME": "eth0"},
        # Its synchronized normalization is for GPUs; of `wide`, see torch_models.py.
        workloads=frozenset(WORKLOADS) - {"resnet", "wide"},
    ),
    "AllReduce": _ours("AllReduce"),
    # What a user's spec says where the link is slower than 1 Gbit/s.
    "AllReduce, link stated": replace(_ours("AllReduce"), train=autodist("AllReduce", 0.2), link="200mbit"),
    "PSLoadBalancing": _ours("PSLoadBalancing"),
    "PartitionedPS": _ours("PartitionedPS"),
    "PartitionedAR": _ours("PartitionedAR", "mlp", "tlm"),
    "Parallax": _ours("Parallax", "emb", "tlm", "dlrm", "wide"),
    BY_HOROVOD: replace(_ours("AllReduce(all_reduce_spec='HOROVOD')"), works_when_idle=True),
    "AllReduce, half": _ours("AllReduce(compressor='HorovodCompressor')", is_exact=False),
    COMPILED: System(compiled_mirrored, is_ours=True, environment=_compiled_environment),
    f"{COMPILED}, Parallax": System(
        compiled_by("Parallax"),
        is_ours=True,
        environment=_autodist_environment,
        workloads=frozenset(("emb", "tlm", "dlrm", "wide")),
    ),
}
