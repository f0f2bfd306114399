"""`autodist verify`, as a user calls it: real scripts, each run several times, on one device and distributed."""

import subprocess
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.diagnostics.recording import RecordedEnough, Recorder, Step, recorded_steps
from autodist_py.diagnostics.verify import compare_steps, rounded_first
from autodist_py.proto.errors import AutoDistError
from tests.support.processes import AUTODIST

pytestmark = [pytest.mark.first, pytest.mark.turns(6)]

ROOT = Path(__file__).resolve().parents[2]
VERIFY = [*AUTODIST, "verify"]

FUNCTION = """
import numpy as np, tensorflow as tf
from autodist_py import AutoDist

autodist = AutoDist()
rng = np.random.default_rng({seed})
weight = tf.Variable(tf.random.normal([3, 2], dtype=tf.float64), name="weight")

@autodist.function
def step(x):
    with tf.GradientTape() as tape:
        hidden = tf.nn.relu(x @ weight, name="hidden")
        loss = tf.reduce_mean({loss})
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return loss

for _ in range(100):
    step(rng.normal(size=(5, 3)))
print("not reached")
"""

SESSION = """
import numpy as np, tensorflow as tf
from autodist_py import AutoDist

autodist = AutoDist()
with tf.Graph().as_default(), autodist.scope():
    x = tf.compat.v1.placeholder(tf.float64, [None, 3])
    weight = tf.compat.v1.get_variable("weight", [3, 2], tf.float64)
    loss = tf.reduce_mean(x @ weight)
    train = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    with autodist.create_distributed_session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        assert np.isfinite(session.run(loss, {x: np.ones((5, 3))}))
        for number in range(2):
            session.run([loss, train], {x: np.random.default_rng(number).normal(size=(5, 3))})
"""


FIT = """
import keras, numpy as np
from autodist_py import AutoDist

autodist = AutoDist(seed=1)
with autodist.scope():
    inputs = keras.Input([3])
    hidden = keras.layers.Dense(4, activation="tanh", name="first")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1)(hidden), keras.layers.Dense(1)(hidden)])
    model.compile("adam", ["mse", "mse"], metrics=["mae", "mae"], jit_compile=False)
rng = np.random.default_rng(1)
x, y = rng.normal(size=(22, 3)), rng.normal(size=22)
model.fit(x, [y, y], batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(x, [y, y]))
"""

ROUNDED = """
import keras, numpy as np
from autodist_py import AutoDist

autodist = AutoDist(seed=1)
x = np.random.default_rng(1).normal(size=(32, 5)).astype("float32")
with autodist.scope():
    layers = [keras.layers.Dense(16, name="before"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers, name="normalized")
    model.compile(keras.optimizers.Lamb(0.01), "mse", jit_compile=False)
model.fit(x, x[:, :1] ** 2, batch_size=16, shuffle=False, verbose=0)
"""


def verify(script, *options, folder=None):
    if folder is not None:
        path = folder / "train.py"
        path.write_text(textwrap.dedent(script))
        script = path
    command = [*VERIFY, *map(str, options), str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.timeout(160)
def test_the_digits_example_is_equal():
    done = verify(ROOT / "examples/digits.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "adam/digits_dense_1_kernel_velocity" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("equal: 3 steps on one device and on 2 workers")


@pytest.mark.timeout(160)
def test_a_session_is_compared_and_a_script_may_train_fewer_steps(tmp_path):
    done = verify(SESSION, "--workers", 1, "--cpus", 2, "--steps", 5, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weight/Momentum" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("equal: 2 steps")


@pytest.mark.timeout(160)
def test_fit_is_compared(tmp_path):
    done = verify(FIT, "--steps", 5, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: 5 steps on one device and on 2 workers" in done.stdout
    assert "adam/first_kernel_momentum" in done.stdout


def test_a_dropout_mask_is_the_first_op_to_part(tmp_path):
    script = FUNCTION.format(seed=1, loss="tf.nn.dropout(hidden, 0.5)")
    done = verify(script, "--workers", 1, "--cpus", 2, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    *_, first, op, _ = done.stdout.splitlines()
    assert first.startswith("different: 'result 0 ")
    assert "dropout" in op and "(RandomUniform)" in op and "at step 1" in op


@pytest.mark.timeout(160)
def test_a_step_that_depends_on_the_clock_is_reported_with_what_parts_first(tmp_path):
    script = FUNCTION.format(seed=1, loss="hidden * tf.timestamp()")
    done = verify(script, "--workers", 1, "--cpus", 2, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    *_, op, why = done.stdout.splitlines()
    assert "(Timestamp), at step 1" in op
    assert "something else each time it runs on one device: 'Timestamp:0 (Timestamp)' parts at step 1" in why


@pytest.mark.timeout(160)
def test_a_gradient_that_is_rounding_alone_is_named(tmp_path):
    """A bias before a normalization has none, and LAMB divides what rounding leaves of it by its size."""
    done = verify(ROUNDED, "--workers", 1, "--cpus", 2, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    *_, first, op, why = done.stdout.splitlines()
    assert "different: 'normalized/before/bias' is the first to part" in first
    assert "lamb/" in op
    assert "BiasAddGrad), at step 1, differs too" in why and "rounding alone" in why and "clock" not in why


@pytest.mark.timeout(160)
def test_what_a_step_function_reads_of_a_static_size_is_not_that_of_a_tf_function(tmp_path):
    """A step is captured for any number of examples; a tf.function is traced for those of a call."""
    done = verify(FUNCTION.format(seed=1, loss="hidden * (x.shape[0] or 1.0)"), folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "different: 'result 0 (" in done.stdout


@pytest.mark.timeout(160)
def test_other_data_in_each_run_are_not_compared(tmp_path):
    done = verify(FUNCTION.format(seed="", loss="hidden"), "--workers", 1, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "different data: input 'x' of step 1" in done.stdout


def test_what_a_failing_script_printed_is_shown(tmp_path):
    done = verify("print('so far')\nraise ValueError('broken')", folder=tmp_path)
    assert done.returncode == 2
    assert "so far" in done.stdout and "ValueError: broken" in done.stdout
    assert "the script failed on one device (exit code 1)" in done.stderr


def test_a_script_that_trains_nothing_is_refused(tmp_path):
    done = verify("print('nothing')", folder=tmp_path)
    assert done.returncode == 2
    assert "trained no step on one device" in done.stderr


EAGER = """
import numpy as np, tensorflow as tf
from autodist_py import AutoDist

autodist = AutoDist(seed=1)
weight = tf.Variable([1.0, 2.0])
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(weight ** 2)
weight.assign_sub(0.1 * tape.gradient(loss, weight))
"""


def test_a_script_that_trains_eagerly_is_refused(tmp_path):
    done = verify(EAGER, "--workers", 1, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "trained no step on one device" in done.stderr


def test_workers_and_a_spec_exclude_each_other(tmp_path):
    done = verify("", "--workers", 2, "--spec", __file__, folder=tmp_path)
    assert done.returncode == 2 and "Received: both" in done.stderr


def values(**arrays):
    return {name: np.asarray(value, np.float64) for name, value in arrays.items()}


def step(weight, loss=1.0):
    return Step(inputs=values(x=[1.0]), ops={}, results=values(loss=loss), variables=values(weight=weight))


def test_what_parts_is_no_rounding_and_what_is_small_beside_it_may_be():
    def steps(*weights, large=1.0):
        return [
            Step(inputs={}, ops={}, results=values(large=[large]), variables=values(weight=[weight]))
            for weight in weights
        ]

    assert rounded_first(steps(1.0, 2.0), {0: steps(1.0, 3.0)}, None) is None
    assert rounded_first(steps(1e-17, 2.0), {0: steps(2e-17, 3.0)}, None) == ("weight", 1)
    assert rounded_first(steps(1.0, 1e-17), {0: steps(2.0, 2e-17)}, None) is None


def test_a_recorder_writes_each_step_and_ends_the_script_after_the_last(tmp_path):
    recorder = Recorder(tmp_path, rank=1, steps=2)
    recorder.add(step(1.0))
    with pytest.raises(RecordedEnough) as ended:
        recorder.add(step(2.0))
    assert ended.value.code == 0
    assert [float(one.variables["weight"]) for one in recorded_steps(tmp_path)[1]] == [1.0, 2.0]


def test_one_worker_that_differs_is_enough():
    comparisons = compare_steps([step(1.0), step(2.0)], {0: [step(1.0), step(2.0)], 1: [step(1.0), step(2.1)]}, None)
    assert comparisons["variables"].first == ("weight", 2)
    assert comparisons["results"].first is None


def test_a_step_is_as_precise_as_its_least_precise_type():
    apart = {0: [step(1.0 + 1e-6)]}
    assert compare_steps([step(1.0)], apart, None)["variables"].first == ("weight", 1)
    mixed = replace(step(1.0), computed_in={"float32", "float64"})
    assert compare_steps([mixed], apart, None)["variables"].first is None


def test_runs_of_different_lengths_are_not_compared():
    with pytest.raises(AutoDistError, match="One device: 1; worker 0: 2"):
        compare_steps([step(1.0)], {0: [step(1.0), step(2.0)]}, None)


@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_recorded_runs_multiply_as_exactly_as_a_gpu_can(monkeypatch, tmp_path, kind):
    monkeypatch.setenv("AUTODIST_RECORD_DIR", str(tmp_path))
    monkeypatch.setenv("AUTODIST_RECORDED_RUN", kind)
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    try:
        tf.config.experimental.enable_tensor_float_32_execution(True)
        AutoDist().close()
        assert not tf.config.experimental.tensor_float_32_execution_enabled()
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
