"""Real runs of two workers: a script, its processes, and what they print. Each run is a script of its own."""

import os
import re
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.processes import ROOT, Command, is_running, kill

PREAMBLE = """
import json, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.cluster.cluster import join_cluster
from autodist_py.config.settings import Settings

SPEC = ResourceSpec((NodeSpec("127.0.0.1", cpus=(0, 1), chief=True), NodeSpec("127.0.0.2")))
print("pid", os.getpid(), flush=True)


def join(**timeout):
    global tf, cluster
    settings = Settings.from_environment()
    cluster = join_cluster(None if settings.is_launched else SPEC, settings, **timeout)
    import tensorflow as tf
    return cluster


def ring(group_key):
    from tensorflow.python.ops import collective_ops, gen_resource_variable_ops
    devices = [f"/job:worker/replica:0/task:{cluster.rank}/device:CPU:{i}" for i in range([2, 1][cluster.rank])]
    tokens = []
    for device in devices:
        with tf.device(device):
            tokens.append(gen_resource_variable_ops.var_handle_op(dtype=tf.float32, shape=[], shared_name=device))

    @tf.function(input_signature=[tf.TensorSpec([None])] * len(devices))
    def reduce(*values):
        results = []
        for device, value, token in zip(devices, values, tokens):
            with tf.device(device):
                results.append(collective_ops.all_reduce_v2(
                    value, 3, group_key, tf.size(value), communication_hint="ring", ordering_token=token))
        return results

    def call(size):
        first = 1 + 2 * cluster.rank
        return [v.numpy().tolist() for v in reduce(*[tf.fill([size], float(first + i)) for i in range(len(devices))])]

    return call


def ready():
    cluster.barrier("ready")
    print("ready", time.time(), flush=True)


def wait_for_ever():
    while True:
        cluster.check()
        time.sleep(0.05)
"""
"""What every script begins with, and may use."""


class Run(Command):
    """A script as the chief's process, and what all its workers print."""

    def __init__(self, folder: Path, body: str, **environment: str):
        script = folder / "train.py"
        script.write_text(PREAMBLE + textwrap.dedent(body))
        own = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        self._processes: dict[int, psutil.Process] = {}
        super().__init__([sys.executable, "-u", str(script)], folder, os.environ | own | environment)

    def end(self, seconds: float) -> int:
        """The chief's exit code, when all of the run's processes have ended."""
        code = super().end(seconds)
        deadline = time.monotonic() + seconds
        while running := [process for process in self._processes.values() if is_running(process)]:
            assert time.monotonic() < deadline, f"{running} still run:\n{self.text}"
            time.sleep(0.02)
        return code

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def causes(self) -> dict[int, str]:
        """The cause that each process printed, by rank."""
        matches = [re.fullmatch(r"(?:\[(\d)\] )?autodist: (.*)", line) for line in list(self.lines)]
        return {int(match[1] or 0): match[2] for match in matches if match}

    def close(self) -> None:
        """All of its processes are ended, if they run."""
        kill(self._processes.values())
        super().close()

    def _note(self, line: str) -> None:
        if match := re.fullmatch(r"(?:\[(\d)\] )?pid (\d+)", line):
            with suppress(psutil.NoSuchProcess):  # Noted while it runs, as its id may be another's afterwards.
                self._processes[int(match[1] or 0)] = psutil.Process(int(match[2]))
        super()._note(line)
