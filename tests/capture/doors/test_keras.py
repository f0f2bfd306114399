"""The Keras door: which models are hooked, and what is left as it was. What they train: `tests/oracle/test_fit.py`."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist, AutoDistError, CaptureError
from autodist_py.program.mode import Mode

ROOT = Path(__file__).resolve().parents[3]


def run(script: str, *arguments: str, **environment: str) -> str:
    """What a process of its own prints."""
    command = [sys.executable, "-c", script, *arguments]
    given = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_made_through_tensorflow_is_hooked() -> None:
    run(
        """
import tensorflow as tf
from autodist_py import AutoDist

with AutoDist().scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
assert "make_train_function" in vars(model)
"""
    )


def test_a_legacy_model_made_through_tensorflow_is_hooked() -> None:
    run(
        """
import tensorflow as tf
from autodist_py import AutoDist

with AutoDist().scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
assert type(model).__module__.startswith("tf_keras"), type(model)
assert "make_train_function" in vars(model)
""",
        TF_USE_LEGACY_KERAS="1",
    )


def test_a_model_of_another_backend_is_refused() -> None:
    said = run(
        """
import sys, types
import keras
from autodist_py import AutoDist, CaptureError

keras.backend.backend = lambda: "jax"  # JAX itself is not installed.
with AutoDist().scope():
    try:
        keras.Sequential([keras.layers.Dense(1)]).compile("sgd", "mse")
    except CaptureError as error:
        print(error)
"""
    )
    assert "Keras's backend is 'jax'" in said
    assert "set KERAS_BACKEND=tensorflow" in said


def test_a_saved_model_needs_no_autodist(tmp_path: Path) -> None:
    run(
        """
import sys
import keras
import numpy as np
from autodist_py import AutoDist

x = np.linspace(-1.0, 1.0, 24).reshape(8, 3)
with AutoDist().scope():
    model = keras.Sequential([keras.layers.Dense(4, activation="relu"), keras.layers.BatchNormalization()])
    model.compile("adam", "mse")
model.fit(x, np.ones([8, 4]), verbose=0)
model.save(sys.argv[1] + "/model.keras")
np.save(sys.argv[1] + "/predicted.npy", model.predict(x, verbose=0))
""",
        str(tmp_path),
    )
    run(
        """
import sys
sys.modules["autodist_py"] = None
import keras
import numpy as np

x = np.linspace(-1.0, 1.0, 24).reshape(8, 3)
model = keras.saving.load_model(sys.argv[1] + "/model.keras")
np.testing.assert_allclose(model.predict(x, verbose=0), np.load(sys.argv[1] + "/predicted.npy"), rtol=1e-6)
model.fit(x, np.ones([8, 4]), verbose=0)
assert "make_train_function" not in vars(model)
""",
        str(tmp_path),
    )


PEAK = """
import resource, sys
import keras
import numpy as np
from autodist_py import AutoDist

def train():
    model = keras.Sequential([keras.Input([2000]), *[keras.layers.Dense(2000) for _ in range(6)]])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(np.ones([32, 2000], np.float32), np.ones([32, 2000], np.float32), batch_size=8, verbose=0)
    print(model.count_params() * 4 / 2**20, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)

if sys.argv[1] == "scope":
    with AutoDist().scope():
        train()
else:
    train()
"""


def test_there_is_no_second_copy_of_the_weights() -> None:
    (size, plain), (_, scope) = (map(float, run(PEAK, where).split()) for where in ("plain", "scope"))
    assert size > 90  # MiB.
    assert scope - plain < 0.5 * size


def compiled(**options: Any) -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse", **options)
    return model


def test_a_train_function_of_a_subclass_wins_with_a_warning() -> None:
    batches: list[Any] = []

    class Own(keras.Sequential):
        def make_train_function(self, force: bool = False) -> Any:
            self.train_function = lambda iterator: batches.append(next(iterator))
            return self.train_function

    with AutoDist().scope():
        model = Own([keras.layers.Dense(2)])
        with pytest.warns(UserWarning, match=r"Own has a make_train_function of its own.*Override train_step"):
            model.compile("sgd", "mse")
        model.train_on_batch(np.ones([4, 2]), np.ones([4, 2]))
    assert len(batches) == 1


def test_a_model_that_was_never_compiled_says_so_as_in_keras() -> None:
    with AutoDist().scope(), pytest.raises(ValueError, match="compile"):
        keras.Sequential([keras.layers.Dense(2)]).fit(np.ones([4, 2]), np.ones([4, 2]), verbose=0)


def test_jit_compile_auto_is_no_jit() -> None:
    with AutoDist().scope():
        model = compiled(jit_compile="auto")
        model.fit(np.ones([4, 2]), np.ones([4, 2]), verbose=0)
        assert not model.jit_compile


def test_options_by_position_are_seen() -> None:
    model = keras.Sequential([keras.layers.Dense(2)])
    with AutoDist().scope(), pytest.raises(CaptureError, match=r"compile\(run_eagerly=True\)"):
        model.compile("sgd", "mse", None, None, None, True)


def test_a_layer_without_weights_trains_nothing_and_says_so() -> None:
    with AutoDist().scope():
        model = keras.Sequential([keras.layers.Rescaling(2.0)])
        model.compile("sgd", "mse", jit_compile=False)
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        history = model.fit(np.ones([4, 2]), np.ones([4, 2]), verbose=0).history
    assert history["loss"] == [1.0]


def test_steps_are_compiled_once_for_all_epochs_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles: list[str] = []
    compile_program = Mode.program

    def counting(mode: Mode, name: str, *args: Any, **kwargs: Any) -> Any:
        compiles.append(name)
        return compile_program(mode, name, *args, **kwargs)

    monkeypatch.setattr(Mode, "program", counting)
    with AutoDist().scope():
        model = compiled(jit_compile=False)
    x, y = np.ones([10, 2]), tf.ones([10, 2])
    for size in (4, 5, 3):
        model.fit(x, y, batch_size=size, epochs=2, validation_data=(x, y), verbose=0)
    assert len(compiles) == 2  # One for training, one for validation.


def test_a_model_that_is_loaded_in_scope_is_compiled_and_hooked(tmp_path: Path) -> None:
    model = compiled()
    model.fit(np.ones([4, 2]), np.ones([4, 2]), verbose=0)
    model.save(tmp_path / "model.keras")
    with AutoDist().scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.compiled
    assert "make_train_function" in vars(loaded)
    loaded.fit(np.ones([4, 2]), np.ones([4, 2]), verbose=0)


def test_a_test_function_of_a_subclass_wins_with_a_warning() -> None:
    class Own(keras.Sequential):
        def make_test_function(self, force: bool = False) -> Any:
            self.test_function = tested
            return self.test_function

    batches: list[Any] = []

    def tested(iterator: Any) -> dict[str, float]:
        batches.append(next(iterator))
        return {"loss": 2.0}

    with AutoDist().scope():
        model = Own([keras.layers.Dense(2)])
        with pytest.warns(UserWarning, match=r"Own has a make_test_function of its own.*Override test_step"):
            model.compile("sgd", "mse")
    model.evaluate(np.ones([4, 2]), np.ones([4, 2]), verbose=0)
    assert len(batches) == 1
    assert "make_train_function" in vars(model)


def test_a_refused_compile_changes_nothing() -> None:
    with AutoDist().scope():
        model = compiled()
        with pytest.raises(CaptureError, match="run_eagerly"):
            model.compile("sgd", "mse", run_eagerly=1)
    assert "make_train_function" in vars(model)
    model.run_eagerly = True
    with pytest.raises(CaptureError, match=r"set to run eagerly.*must be a graph"):
        model.fit(np.ones([4, 2]), np.ones([4, 2]), verbose=0)


def test_models_are_let_go() -> None:
    with AutoDist() as autodist, autodist.scope():
        model = compiled()
        for _ in range(3):
            model.compile("sgd", "mse")
            model.fit(np.ones([4, 2]), np.ones([4, 2]), verbose=0)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


def test_a_function_set_by_the_user_is_no_hook() -> None:
    model = compiled()
    model.make_train_function = lambda force=False: None
    with AutoDist().scope(), pytest.raises(CaptureError, match="compiled outside of it"):
        model.fit(np.ones([4, 2]), np.ones([4, 2]), verbose=0)


def test_a_model_of_a_closed_autodist_says_so() -> None:
    with AutoDist() as autodist, autodist.scope():
        model = compiled()
    with pytest.raises(AutoDistError, match=r"after this AutoDist was closed.*compile Keras models again"):
        model.fit(np.ones([4, 2]), np.ones([4, 2]), verbose=0)


def test_a_stateful_layer_is_refused_where_the_batch_is_shared_out(tmp_path: Path) -> None:
    spec = tmp_path / "resources.yaml"
    spec.write_text("nodes: [{address: 127.0.0.1, cpus: [0, 1]}]")
    said = run(
        """
import sys
import keras
import numpy as np
from autodist_py import AutoDist, CaptureError

with AutoDist(sys.argv[1]).scope():
    model = keras.Sequential([keras.Input([3, 2], batch_size=4), keras.layers.GRU(2, stateful=True, name="kept")])
    model.compile("sgd", "mse", jit_compile=False)
try:
    model.fit(np.ones([4, 3, 2]), np.ones([4, 2]), batch_size=4, verbose=0)
except CaptureError as error:
    print(error)
""",
        str(spec),
    )
    assert "layer 'kept' is stateful" in said
