"""Mistakes in a script that several workers run: every process says the one cause, fails, and none is left behind."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from autodist_py.config.resource_spec import local_resource_spec

PREAMBLE = """
import sys
import numpy as np
import tensorflow as tf
from autodist_py import AutoDist
"""

JOIN = """
autodist = AutoDist()
weight = tf.Variable(tf.zeros([3]), name="weight")

def update(x, power=2):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.reduce_sum(x * weight, 1) ** power)
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return loss
"""

CASES = {
    "an eager variable made before AutoDist": (
        "weight = tf.Variable(1.0)\nAutoDist()\n",
        ("AutoDist", "before"),
    ),
    "a script that differs between workers": (
        JOIN + "step = autodist.function(lambda x: update(x, 2 + autodist.rank))\nstep(np.ones([4, 3], np.float32))\n",
        ("same graph on every worker, but worker 1 builds another than the chief", "the rank"),
    ),
    "an exception on one worker": (
        JOIN
        + "step = autodist.function(update)\n"
        + "for i in range(100):\n"
        + "    step(np.ones([4, 3], np.float32))\n"
        + "    if i == 5 and autodist.rank == 1:\n"
        + "        raise ValueError('lost my data')\n",
        ("worker 1 (127.0.0.2) failed at step 6: ValueError: lost my data",),
    ),
    "static shapes on two workers": (
        "autodist = AutoDist()\n"
        "with tf.Graph().as_default(), autodist.scope():\n"
        "    x = tf.compat.v1.placeholder(tf.float32, [4], 'x')\n"
        "    weight = tf.compat.v1.get_variable('weight', [])\n"
        "    train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(weight * x))\n"
        "    session = autodist.create_distributed_session()\n"
        "    session.run(train, {x: np.ones(4)})\n",
        ("'x' [4]. Make it None",),
    ),
    "data that differ between workers": (
        JOIN
        + "step = autodist.function(lambda autodist_x: update(autodist_x))\n"  # Whatever it is called.
        + "rng = np.random.default_rng(0)\n"
        + "for i in range(9):\n"
        + "    x = rng.normal(size=[4, 3]).astype(np.float32)\n"
        + "    step(x[::-1] if i == 4 and autodist.rank == 1 else x)\n",
        ("same global batch, but 'autodist_x' of worker 1 differs from the chief's", 'AutoDist(batch="local")'),
    ),
    "other arguments on one worker": (
        "import os\nAutoDist(batch='local' if 'AUTODIST_RANK' in os.environ else 'global')\n",
        ("same arguments; batch is 'global' on the chief, and 'local' on worker 1",),
    ),
    "a write that differs": (
        JOIN
        + "drawn = tf.Variable(0, name='drawn')\n"
        + "@autodist.function\n"
        + "def step(x):\n"
        + "    drawn.assign(tf.random.uniform([], maxval=9, dtype=tf.int32))\n"
        + "    return update(x)\n"
        + "step(np.ones([4, 3], np.float32))\n",
        ("variable 'drawn' is written by", "neither a sum nor a mean"),
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("body", "messages"), CASES.values(), ids=CASES.keys())
def test_a_mistake_ends_the_run_on_every_worker_with_its_cause(
    body: str, messages: tuple[str, ...], tmp_path: Path
) -> None:
    script, spec = tmp_path / "train.py", tmp_path / "cluster.yml"
    marker = f"marker-{os.getpid()}-{tmp_path.name}"
    script.write_text(textwrap.dedent(PREAMBLE) + body)
    spec.write_text(local_resource_spec(2).to_yaml())

    done = subprocess.run(
        [sys.executable, str(script), marker],
        env=os.environ | {"AUTODIST_RESOURCE_SPEC": str(spec), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    output = done.stdout + done.stderr
    assert done.returncode != 0
    chief = "\n".join(line for line in output.splitlines() if not line.startswith("[1]"))
    worker = "\n".join(line for line in output.splitlines() if line.startswith("[1]"))
    for message in messages:
        assert message in chief, output
    if worker:  # An error made before the workers are started is the chief's alone.
        assert messages[0] in worker, output
    left = [process.pid for process in psutil.process_iter(["cmdline"]) if marker in (process.info["cmdline"] or ())]
    assert not left
