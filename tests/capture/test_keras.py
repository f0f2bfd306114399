"""Which models the Keras door hooks. What they train is compared in `tests/test_oracle_fit.py`."""

import subprocess
import sys


def test_a_model_made_through_tensorflow_is_hooked() -> None:
    script = """
import tensorflow as tf
from autodist_py import AutoDist

with AutoDist().scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
assert "make_train_function" in vars(model)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
