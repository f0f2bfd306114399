"""The Keras door: a model that is compiled in `scope()` trains and evaluates on all workers, by steps of our functions.

`fit`, `evaluate`, their callbacks and progress bars stay Keras's own; what `make_train_function` and
`make_test_function` make is ours. `predict` runs as it is, whole, on each worker. Keras 3 and tf_keras are served
alike.
"""

import functools
import importlib
import inspect
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.capture.doors.keras_steps import Ends, Steps, Workers, endless
from autodist_py.capture.doors.outside import require_no_strategy
from autodist_py.proto.errors import CaptureError

Change = Callable[[Any], Any]
"""What becomes of an argument."""

_LEGACY = "tf_keras"
_OVERRIDDEN = ("compile", "evaluate", "fit", "predict")
_TRAINING = ("fit", "train_on_batch")
_FUNCTIONS = ("make_train_function", "make_test_function")
_WRITE_FILES = ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "RemoteMonitor", "TensorBoard")
"""Callbacks that are the chief's alone: all workers would write the same files, or send the same messages."""


@contextmanager
def compiled_models(workers: Workers) -> Iterator[None]:
    """Models that are compiled within this context train and evaluate on all `workers`."""
    modules = [importlib.import_module("keras")]  # Not at import: it fixes the backend.
    if _LEGACY in sys.modules or os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "True", "true"):
        modules.append(importlib.import_module(_LEGACY))
    with ExitStack() as stack:
        for keras in modules:
            patches = {"compile": _hooking(keras, workers)}
            patches |= {name: _checking(keras, name) for name in _TRAINING}
            for name, patch in patches.items():
                stack.enter_context(_patched_method(keras.Model, name, patch))
        yield


@contextmanager
def refused_models() -> Iterator[None]:
    """Models are not compiled within this context: in a graph Keras has a loop and a session of its own.

    Raises:
        CaptureError: one is.
    """
    with ExitStack() as stack:
        for model in tf_adapter.loaded_models():
            stack.enter_context(_patched_method(model, "compile", _refuse_compile))
        yield


def _refuse_compile(model: Any, *args: Any, **options: Any) -> None:
    raise CaptureError(
        f"'{model.name}' is compiled in scope() in a tf.Graph, where Keras's own loop trains it in a session of its "
        "own, so that every worker would train by itself. Leave tf.Graph().as_default() (or what disables eager "
        "execution) out: fit is distributed then; or minimize its loss by an optimizer of tf.compat.v1.train, and run "
        "that in autodist.create_distributed_session()"
    )


def _patched_method(model: type, name: str, patch: Any) -> AbstractContextManager[None]:
    """The method is replaced where it is defined: Keras asks whether a class has a compile of its own."""
    return tf_adapter.patched(next(each for each in model.__mro__ if name in vars(each)), name, patch)


def hooked(model: Any) -> "HookedModel | None":
    """What makes `model` train on all workers; None where it trains on one device."""
    found = getattr(vars(model).get("compile"), "__self__", None)
    return found if isinstance(found, HookedModel) else None


def _hooking(keras: Any, workers: Workers) -> Callable[..., None]:
    original = keras.Model.compile

    @functools.wraps(original)
    def compile(model: Any, *args: Any, **options: Any) -> None:
        given = inspect.signature(original).bind(model, *args, **options).arguments
        _require_compilable(keras, given)
        original(model, *args, **options)
        HookedModel(keras, model, workers).hook()

    return compile


def _checking(keras: Any, name: str) -> Callable[..., Any]:
    original = getattr(keras.Model, name)

    @functools.wraps(original)
    def train(model: Any, *args: Any, **options: Any) -> Any:
        is_compiled = getattr(model, "compiled", None) or getattr(model, "_is_compiled", False)
        if is_compiled and hooked(model) is None:
            raise CaptureError(
                f"'{model.name}' is fitted ({name}) in scope() and was compiled outside of it, so that every worker "
                "would train it by itself; compile it in scope()"
            )
        return original(model, *args, **options)

    return train


def _require_compilable(keras: Any, options: dict[str, Any]) -> None:
    require_no_strategy("a model is compiled in scope()")
    if keras.backend.backend() != "tensorflow":
        raise CaptureError(
            f"a model is compiled in scope() while Keras's backend is '{keras.backend.backend()}'; autodist_py "
            "distributes TensorFlow graphs, so set KERAS_BACKEND=tensorflow before Keras is imported"
        )
    for name, why in (("run_eagerly", "a step must be a graph"), ("jit_compile", "XLA does not run collectives")):
        if options.get(name) not in (None, False, "auto"):
            raise CaptureError(
                f"compile({name}=True) cannot be distributed: {why}. Leave {name} out in scope(), or compile outside "
                "of it to train on one device"
            )


class HookedModel:
    """A model whose steps are distributed. The hook is no attribute that Keras tracks, copies or saves."""

    def __init__(self, keras: Any, model: Any, workers: Workers):
        self._keras, self._model, self._workers = keras, model, workers
        self._ends = Ends(model.name)
        self._steps: dict[str, Steps] = {}
        self._goes_on_empty: dict[str, bool] = {}

    def hook(self) -> None:
        """Let the model use our steps, but for those that it makes by itself."""
        overrides = {name: getattr(self, name) for name in _OVERRIDDEN}
        for name in _FUNCTIONS:
            if getattr(type(self._model), name) is getattr(self._keras.Model, name):
                overrides[name] = getattr(self, name)
            elif name == "make_train_function" and self._workers.num_workers > 1:
                raise CaptureError(
                    f"{type(self._model).__name__} has a make_train_function of its own: what it makes is not "
                    "distributed, so that every worker would train by itself. Override train_step instead, or compile "
                    "the model outside of scope()"
                )
            else:
                warnings.warn(
                    f"{type(self._model).__name__} has a {name} of its own, which is used: what it makes is not "
                    f"distributed. Override {name.split('_')[1]}_step instead",
                    stacklevel=4,
                )
        vars(self._model).update(overrides)

    @property
    def _is_legacy(self) -> bool:
        return bool(self._keras.__name__ == _LEGACY)

    @property
    def examples(self) -> int:
        """How many examples it was trained on since it was compiled, over all workers."""
        return self._steps["train"].examples if "train" in self._steps else 0

    def compile(self, *args: Any, **options: Any) -> None:
        """Keras's own: a model that is compiled again outside of scope() trains on one device again."""
        overrides = {name: vars(self._model).pop(name, None) for name in (*_OVERRIDDEN, *_FUNCTIONS)}
        try:
            self._model.compile(*args, **options)
        except Exception:  # It is no other model than before.
            vars(self._model).update({name: override for name, override in overrides.items() if override is not None})
            raise

    def fit(self, *args: Any, **options: Any) -> Any:
        """Keras's own, with callbacks that write files on the chief only.

        Raises:
            CaptureError: a callback that cannot run on several workers.
            ClusterError: the data end earlier on some workers than on others, or differ.
        """
        changes: dict[str, Change] = {
            "callbacks": lambda callbacks: [self._syncing(), *self._callbacks_here(callbacks)],
            "x": partial(self._data_of, "train"),
            "validation_data": partial(self._data_of, "test"),
        }
        return self._run("fit", args, options, changes)

    def evaluate(self, *args: Any, **options: Any) -> Any:
        """As `fit`."""
        is_of_fit = options.get("_use_cached_eval_dataset", False)
        changes: dict[str, Change] = {"callbacks": self._callbacks_here, "x": partial(self._data_of, "test")}
        return self._run("evaluate", args, options, {} if is_of_fit else changes)

    def predict(self, *args: Any, **options: Any) -> Any:
        """Keras's own, with callbacks that write files on the chief only."""
        self._workers.pull(self._variables)
        return self._run("predict", args, options, {"callbacks": self._callbacks_here})

    def _run(self, method: str, args: Sequence[Any], options: dict[str, Any], changes: Mapping[str, Change]) -> Any:
        """What the model's own `method` returns, when arguments are given as `changes` makes them, by name."""
        if self._workers.num_workers > 1:
            names = [*inspect.signature(getattr(self._keras.Model, method)).parameters][1:]
            args = [
                changes.get(name or "", _unchanged)(value)
                for name, value in itertools.zip_longest(names[: len(args)], args)
            ]
            given = options if "callbacks" in names[: len(args)] else {"callbacks": None, **options}
            options = {name: changes.get(name, _unchanged)(value) for name, value in given.items()}
        result = getattr(type(self._model), method)(self._model, *args, **options)
        self._require_same_data()
        return result

    def _require_same_data(self) -> None:
        self._ends.require_same()
        if not any(self._goes_on_empty.values()):
            self._ends.require_together()

    def _data_of(self, kind: str, data: Any) -> Any:
        """`data` for training or testing: each worker's own dataset goes on empty until those of all have ended."""
        self._goes_on_empty[kind] = self._workers.batch == "local" and isinstance(data, tf.data.Dataset)
        return endless(data) if self._goes_on_empty[kind] else data

    def _callbacks_here(self, callbacks: Any) -> Any:
        """Those of the user's callbacks that run on this worker, and what shares what one of them restores."""
        if isinstance(callbacks, self._keras.callbacks.CallbackList):
            raise CaptureError("with several workers callbacks are given as a list, not as a CallbackList")
        writing = tuple(
            getattr(self._keras.callbacks, name) for name in _WRITE_FILES if hasattr(self._keras.callbacks, name)
        )
        here: list[Any] = []
        has_files = False
        for callback in tf.nest.flatten(callbacks) if callbacks else []:
            has_files |= isinstance(callback, writing)
            if self._workers.rank == 0 or not isinstance(callback, writing):
                here.append(callback)
            if isinstance(callback, self._keras.callbacks.BackupAndRestore):
                if self._is_legacy:
                    raise CaptureError(
                        "BackupAndRestore of tf_keras would restore other weights on each worker; use ModelCheckpoint, "
                        "and load_weights() on every worker before fit(), or Keras 3"
                    )
                here.append(self._keras.callbacks.LambdaCallback(on_train_begin=lambda logs: self._follow_chief()))
        if has_files:  # What they have written is there when fit returns.
            topology = f"the end of fitting '{self._model.name}'"
            arrive = self._keras.callbacks.LambdaCallback(on_train_end=lambda logs: self._workers.await_chief(topology))
            here.append(arrive)
        return here

    @property
    def _variables(self) -> list[tf.Variable]:
        return [one if isinstance(one, tf.Variable) else one.value for one in self._model.variables]

    def _syncing(self) -> Any:
        """What brings the variables up to date before the user's callbacks see them.

        Where workers step by themselves the chief's logs are everyone's, so that callbacks decide alike.
        """

        def sync(epoch: int, logs: Any) -> None:
            self._require_same_data()
            self._workers.sync(self._variables)
            if logs is not None and self._workers.are_apart():
                own = json.dumps({name: float(value) for name, value in logs.items()})
                logs.update(json.loads(self._workers.compare(own.encode())[0]))

        return self._keras.callbacks.LambdaCallback(on_epoch_end=sync)

    def _follow_chief(self) -> None:
        """Take over what BackupAndRestore restored on the chief."""
        model = self._model
        own = json.dumps([model._initial_epoch, model.optimizer.built])
        model._initial_epoch, is_built = json.loads(self._workers.compare(own.encode())[0])
        if is_built and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._workers.take_chiefs([one.value for one in (*model.variables, *model.optimizer.variables)])

    def make_train_function(self, force: bool = False) -> Any:
        """In the place of `keras.Model.make_train_function`."""
        model = self._model
        if model.train_function is None or force:
            model.train_function = self._steps_of("train", model.train_step)
        return model.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """In the place of `keras.Model.make_test_function`."""
        model = self._model
        if model.test_function is None or force:
            model.test_function = self._steps_of("test", model.test_step)
        return model.test_function

    def _steps_of(self, kind: str, step: Callable[[Any], Any]) -> Steps:
        self._require_distributable()
        model = self._model
        if not self._is_legacy:
            step = tf.autograph.experimental.do_not_convert(step)  # As Keras calls it.
        else:
            own_step, counter = tf_adapter.unconverted(step), getattr(model, f"_{kind}_counter")

            def step(data: Any) -> Any:
                results = own_step(data)
                counter.assign_add(1)
                return results

        self._steps[kind] = Steps(
            step,
            self._workers,
            self._ends,
            name=f"to {kind} '{model.name}'",
            num_steps=lambda: int(model._steps_per_execution if self._is_legacy else model.steps_per_execution),
            goes_on_empty=lambda: self._goes_on_empty.get(kind, False),
        )
        return self._steps[kind]

    def _require_distributable(self) -> None:
        model = self._model
        if model.run_eagerly:
            raise CaptureError(
                f"'{model.name}' is set to run eagerly, and a step that is distributed must be a graph. Leave "
                "run_eagerly out, or compile the model outside of scope() to train it on one device"
            )
        recurrent = (layer for layer in model._flatten_layers() if isinstance(layer, self._keras.layers.RNN))
        stateful = [layer.name for layer in recurrent if layer.stateful]
        if stateful and self._workers.num_replicas > 1:
            raise CaptureError(
                f"layer '{stateful[0]}' is stateful: it keeps a row for each example of a batch, and the batch is "
                "shared out among replicas. Use stateful=False, or compile the model outside of scope()"
            )


def _unchanged(value: Any) -> Any:
    return value
