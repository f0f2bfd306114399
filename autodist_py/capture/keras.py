"""The Keras door: a Keras 3 model that is compiled in `scope()` trains through `fit`, step by step, by our function.

`fit` itself, its callbacks, progress bar and validation stay Keras's own; what `make_train_function` makes is ours.
Keras's `evaluate` and `predict` run as they are, whole, on each worker.
"""

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.proto.errors import CaptureError

Distribute = Callable[[Callable[[Any], Any]], Callable[[Any], Any]]
"""A step of one device, of one batch of data -> the distributed step."""

_OVERRIDDEN = ("compile", "fit", "make_train_function")
_WRITE_FILES = ("CSVLogger", "ModelCheckpoint", "TensorBoard")
"""Callbacks that are the chief's alone: all workers would write the same files."""


@contextmanager
def compiled_models(distribute: Distribute, *, rank: int, alone: bool) -> Iterator[None]:
    """Models that are compiled within this context train by the steps that `distribute` makes.

    Args:
        distribute: makes a step of all workers.
        rank: this worker's; the chief's is 0.
        alone: whether there is no other worker.
    """
    keras: Any = importlib.import_module("keras")  # Not at import: it fixes the backend.
    with ExitStack() as stack:
        stack.enter_context(tf_adapter.patched(keras.Model, "compile", _hooking(keras, distribute, rank, alone)))
        stack.enter_context(tf_adapter.patched(keras.Model, "fit", _checking(keras)))
        if "tf_keras" in sys.modules:
            stack.enter_context(tf_adapter.patched(sys.modules["tf_keras"].Model, "compile", _refuse_legacy))
        yield


def _hooking(keras: Any, distribute: Distribute, rank: int, alone: bool) -> Callable[..., None]:
    original = keras.Model.compile

    def compile(model: Any, *args: Any, **options: Any) -> None:
        _require_compilable(keras, options)
        original(model, *args, **options)
        if type(model).make_train_function is not keras.Model.make_train_function:
            warnings.warn(
                f"{type(model).__name__} has a make_train_function of its own, which is used: what it makes is not "
                "distributed. Override train_step instead",
                stacklevel=2,
            )
            return
        HookedModel(keras, model, distribute, is_chief=rank == 0, is_alone=alone).hook()

    return compile


def _checking(keras: Any) -> Callable[..., Any]:
    original = keras.Model.fit

    @functools.wraps(original)
    def fit(model: Any, *args: Any, **options: Any) -> Any:
        is_own = type(model).make_train_function is not keras.Model.make_train_function
        if not is_own and "make_train_function" not in vars(model):
            raise CaptureError(
                f"'{model.name}' is fitted in scope() and was compiled outside of it, so that every worker would train "
                "it by itself; compile it in scope()"
            )
        return original(model, *args, **options)

    return fit


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


def _refuse_legacy(model: Any, *args: Any, **options: Any) -> None:
    raise CaptureError(
        f"'{model.name}' is a tf_keras model, and this version distributes `fit` of Keras 3 models only; train it by a "
        "step function (autodist.function), or in graph mode"
    )


class HookedModel:
    """A model whose training steps are distributed. The hook is no attribute that Keras tracks, copies or saves."""

    def __init__(self, keras: Any, model: Any, distribute: Distribute, *, is_chief: bool, is_alone: bool):
        self._keras, self._model, self._distribute = keras, model, distribute
        self._is_chief, self._is_alone = is_chief, is_alone
        self._fit_signature = inspect.signature(type(model).fit)

    def hook(self) -> None:
        """Let the model's `fit` and `train_on_batch` use our steps."""
        for name in _OVERRIDDEN:
            vars(self._model)[name] = getattr(self, name)

    def compile(self, *args: Any, **options: Any) -> None:
        """Keras's own: a model that is compiled again outside of scope() trains on one device again."""
        for name in _OVERRIDDEN:
            vars(self._model).pop(name, None)
        self._model.compile(*args, **options)

    def fit(self, *args: Any, **options: Any) -> Any:
        """Keras's own, with callbacks that write files on the chief only.

        Raises:
            CaptureError: a callback that this version cannot run on several workers.
        """
        given = self._fit_signature.bind(self._model, *args, **options)
        callbacks = given.arguments.get("callbacks")
        if not self._is_alone and isinstance(callbacks, list | tuple):
            self._require_runnable(callbacks)
            if not self._is_chief:
                writing = tuple(getattr(self._keras.callbacks, name) for name in _WRITE_FILES)
                given.arguments["callbacks"] = [one for one in callbacks if not isinstance(one, writing)]
        return type(self._model).fit(*given.args, **given.kwargs)

    def _require_runnable(self, callbacks: Iterable[Any]) -> None:
        if any(isinstance(one, self._keras.callbacks.BackupAndRestore) for one in callbacks):
            raise CaptureError(
                "BackupAndRestore would restore other weights on each worker, and this version does not share them; "
                "use ModelCheckpoint, and load_weights() on every worker before fit()"
            )

    def make_train_function(self, force: bool = False) -> Any:
        """In the place of `keras.Model.make_train_function`."""
        model = self._model
        if model.train_function is None or force:
            model.train_function = self._steps(model.train_step)
        return model.train_function

    def _steps(self, step: Callable[[Any], Any]) -> Callable[[Iterator[Any]], Any]:
        """A function that takes as many elements of an iterator as Keras wants at once, with a step for each."""

        def one_step(data: Any) -> Any:
            return step(data)

        distributed = self._distribute(one_step)

        def steps(iterator: Iterator[Any]) -> Any:
            logs = distributed(_present(next(iterator)))  # The end of the data is Keras's to see.
            for _ in range(1, self._model.steps_per_execution):
                data = next(iterator, None)
                if data is None:
                    break
                logs = distributed(_present(data))
            return logs

        return steps


def _present(data: Any) -> Any:
    """`data` with None for what Keras's adapters mark as absent."""
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
