"""The Keras door: a model that is compiled in `scope()` trains and evaluates on all workers, by steps of our functions.

`fit`, `evaluate`, their callbacks and progress bars stay Keras's own; what `make_train_function` and
`make_test_function` make is ours. `predict` runs as it is, whole, on each worker. Keras 3 and tf_keras are served
alike.
"""

import functools
import importlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.capture.keras_steps import Ends, Steps, Workers
from autodist_py.proto.errors import CaptureError

_LEGACY = "tf_keras"
_OVERRIDDEN = ("compile", "fit", "make_test_function", "make_train_function")
_WRITE_FILES = ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "TensorBoard")
"""Callbacks that are the chief's alone: all workers would write the same files."""


@contextmanager
def compiled_models(workers: Workers) -> Iterator[None]:
    """Models that are compiled within this context train and evaluate on all `workers`."""
    modules = [importlib.import_module("keras")]  # Not at import: it fixes the backend.
    if _LEGACY in sys.modules or os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "True", "true"):
        modules.append(importlib.import_module(_LEGACY))
    with ExitStack() as stack:
        for keras in modules:
            stack.enter_context(tf_adapter.patched(keras.Model, "compile", _hooking(keras, workers)))
            stack.enter_context(tf_adapter.patched(keras.Model, "fit", _checking(keras)))
        yield


def hooked(model: Any) -> "HookedModel | None":
    """What makes `model` train on all workers; None where it trains on one device."""
    override = vars(model).get("make_train_function")
    return override.__self__ if override is not None else None


def _hooking(keras: Any, workers: Workers) -> Callable[..., None]:
    original = keras.Model.compile

    @functools.wraps(original)
    def compile(model: Any, *args: Any, **options: Any) -> None:
        given = inspect.signature(original).bind(model, *args, **options).arguments
        _require_compilable(keras, given)
        original(model, *args, **options)
        if _has_own_train_function(keras, model):
            warnings.warn(
                f"{type(model).__name__} has a make_train_function of its own, which is used: what it makes is not "
                "distributed. Override train_step instead",
                stacklevel=2,
            )
            return
        HookedModel(keras, model, workers).hook()

    return compile


def _checking(keras: Any) -> Callable[..., Any]:
    original = keras.Model.fit

    @functools.wraps(original)
    def fit(model: Any, *args: Any, **options: Any) -> Any:
        is_compiled = getattr(model, "compiled", None) or getattr(model, "_is_compiled", False)
        if is_compiled and hooked(model) is None and not _has_own_train_function(keras, model):
            raise CaptureError(
                f"'{model.name}' is fitted in scope() and was compiled outside of it, so that every worker would train "
                "it by itself; compile it in scope()"
            )
        return original(model, *args, **options)

    return fit


def _has_own_train_function(keras: Any, model: Any) -> bool:
    return type(model).make_train_function is not keras.Model.make_train_function


def _require_compilable(keras: Any, options: dict[str, Any]) -> None:
    if keras.backend.backend() != "tensorflow":
        raise CaptureError(
            f"a model is compiled in scope() while Keras's backend is '{keras.backend.backend()}'; autodist_py "
            "distributes TensorFlow graphs, so set KERAS_BACKEND=tensorflow before Keras is imported"
        )
    for name, why in (("run_eagerly", "a step must be a graph"), ("jit_compile", "XLA does not run collectives")):
        if options.get(name) is True:
            raise CaptureError(
                f"compile({name}=True) cannot be distributed: {why}. Leave {name} out in scope(), or compile outside "
                "of it to train on one device"
            )


class HookedModel:
    """A model whose steps are distributed. The hook is no attribute that Keras tracks, copies or saves."""

    def __init__(self, keras: Any, model: Any, workers: Workers):
        self._keras, self._model, self._workers = keras, model, workers
        self._fit_signature = inspect.signature(type(model).fit)
        self._ends = Ends(model.name)
        self._train_steps: Steps | None = None

    def hook(self) -> None:
        """Let the model use our steps."""
        for name in _OVERRIDDEN:
            vars(self._model)[name] = getattr(self, name)

    @property
    def examples(self) -> int:
        """How many examples it was trained on since it was compiled, over all workers."""
        return 0 if self._train_steps is None else self._train_steps.examples

    def compile(self, *args: Any, **options: Any) -> None:
        """Keras's own: a model that is compiled again outside of scope() trains on one device again."""
        for name in _OVERRIDDEN:
            vars(self._model).pop(name, None)
        self._model.compile(*args, **options)

    def fit(self, *args: Any, **options: Any) -> Any:
        """Keras's own, with callbacks that write files on the chief only.

        Raises:
            CaptureError: a callback that cannot run on several workers.
            ClusterError: the data end earlier on some workers than on others.
        """
        given = self._fit_signature.bind(self._model, *args, **options)
        callbacks = given.arguments.get("callbacks")
        if self._workers.num_workers > 1 and isinstance(callbacks, list | tuple):
            given.arguments["callbacks"] = self._callbacks_here(callbacks)
        history = type(self._model).fit(*given.args, **given.kwargs)
        self._ends.require_together()
        return history

    def _callbacks_here(self, callbacks: Sequence[Any]) -> list[Any]:
        """Those of the user's callbacks that run on this worker, and what shares what one of them restores."""
        writing = tuple(getattr(self._keras.callbacks, name) for name in _WRITE_FILES)
        here = []
        for callback in callbacks:
            if self._workers.rank == 0 or not isinstance(callback, writing):
                here.append(callback)
            if isinstance(callback, self._keras.callbacks.BackupAndRestore):
                if self._keras.__name__ == _LEGACY:
                    raise CaptureError(
                        "BackupAndRestore of tf_keras would restore other weights on each worker; use ModelCheckpoint, "
                        "and load_weights() on every worker before fit(), or Keras 3"
                    )
                here.append(self._keras.callbacks.LambdaCallback(on_train_begin=lambda logs: self._follow_chief()))
        return here

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
            model.train_function = self._train_steps = self._steps(model.train_step, "_train_counter")
        return model.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """In the place of `keras.Model.make_test_function`."""
        model = self._model
        if model.test_function is None or force:
            model.test_function = self._steps(model.test_step, "_test_counter")
        return model.test_function

    def _steps(self, step: Callable[[Any], Any], counter: str) -> Steps:
        step = tf.autograph.experimental.do_not_convert(step)  # As Keras calls it.
        if self._keras.__name__ != _LEGACY:
            return Steps(step, self._workers, self._ends, lambda: self._model.steps_per_execution)

        def counted(data: Any) -> Any:
            results = step(data)
            getattr(self._model, counter).assign_add(1)
            return results

        return Steps(counted, self._workers, self._ends, lambda: int(self._model._steps_per_execution))
