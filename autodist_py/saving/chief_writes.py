"""`ChiefWrites`: in a run of several workers what Keras and TensorFlow write is written once, by the chief.

A writer that all workers call is a place of the script: the chief writes there, waits for nobody, and announces how it
went; the others wait for that, and then return, or raise, what the chief's call did. Where the chief goes on without
writing, as its script calls the writer elsewhere, for another path, or not at all, the file is the worker's own.
"""

import functools
import inspect
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Protocol

import tensorflow as tf

from autodist_py.capture.tf_adapter import patched
from autodist_py.cluster.cluster import Cluster
from autodist_py.saving import tf_adapter
from autodist_py.saving.outcome import of_error, of_value, value_of
from autodist_py.saving.staging import staged
from autodist_py.saving.tf_adapter import Writer


class Pausing(Protocol):
    """What lets other workers step without this one's next step."""

    def pause(self) -> None:
        """This worker is about to wait."""
        ...


class _Thread(threading.local):
    """What a thread is at: a writer's call, on the way to a file, or following the chief's."""

    is_inside = False
    is_staging = False
    is_following = False
    chiefs: Any = None


class ChiefWrites:
    """Replaces the writers of this process, for as long as it is a worker of several."""

    of_process: ClassVar["ChiefWrites | None"] = None

    def __init__(self, cluster: Cluster):
        """Nothing is replaced yet."""
        self._cluster = cluster
        self._served: weakref.WeakSet[Pausing] = weakref.WeakSet()
        self._thread = _Thread()
        self._stack = ExitStack()
        self._kerases: set[str] = set()

    @classmethod
    def of(cls, cluster: Cluster) -> "ChiefWrites":
        """The one of this process, which is a worker of the cluster."""
        if cls.of_process is None:
            cls.of_process = cls(cluster)
            cls.of_process.replace()
        return cls.of_process

    def replace(self) -> None:
        """From now on the chief writes."""
        self._replace(tf_adapter.tensorflow_writers())
        self._stack.enter_context(tf_adapter.kept_from(lambda: self._thread.is_following, patched))
        self.look()

    def restore(self) -> None:
        """From now on each worker writes what it is told, as Keras and TensorFlow do."""
        self._stack.close()
        self._kerases.clear()
        ChiefWrites.of_process = None

    def look(self) -> None:
        """A package that the script has imported meanwhile is known, too."""
        for name in tf_adapter.loaded_kerases():
            if name not in self._kerases:
                self._kerases.add(name)
                self._replace(tf_adapter.keras_writers(name))

    def pause_before_waiting(self, served: Pausing) -> None:
        """Where this worker waits for the chief, `served` lets others step."""
        self._served.add(served)

    def _replace(self, writers: Sequence[Writer]) -> None:
        for writer in writers:
            original = getattr(writer.owner, writer.attribute)
            self._stack.enter_context(patched(writer.owner, writer.attribute, self._replacement(writer, original)))

    def _replacement(self, writer: Writer, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def write(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:  # The original says it in its own words.
                return original(*args, **kwargs)
            if bound.arguments.get("options") is not None:
                bound.arguments["options"] = tf_adapter.without_threads(bound.arguments["options"])
            return self._write(writer, original, bound)

        return write

    def _write(self, writer: Writer, original: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        thread = self._thread
        if thread.is_following and writer.attribute == "_write":
            return tf_adapter.note_written(bound.args[0], thread.chiefs, bound.arguments.get("options"))
        path = bound.arguments[writer.path] if writer.path else tf_adapter.topology_of(writer, bound.args[0])
        is_place = isinstance(path, str | os.PathLike)  # Else a file that the script has opened, or memory.
        if not is_place or tf.inside_function():
            return original(*bound.args, **bound.kwargs)
        if thread.is_inside:
            return self._write_here(writer, original, bound)
        key = f"{writer.name} of {os.fspath(path)!r}"
        with _set(thread, is_inside=True):
            if self._cluster.is_chief:
                return self._write_for_all(key, lambda: self._write_here(writer, original, bound))
            for served in list(self._served):
                served.pause()
            heard = self._cluster.hear(key)
            if heard is None:
                return self._write_here(writer, original, bound)
            return self._follow(writer, original, bound, json.loads(heard))

    def _write_for_all(self, key: str, write: Callable[[], Any]) -> Any:
        results: list[Any] = []
        errors: list[Exception] = []

        def made() -> bytes:
            try:
                results.append(write())
            except Exception as error:
                errors.append(error)
                return json.dumps(of_error(error)).encode()
            return json.dumps(of_value(results[0])).encode()

        self._cluster.announce(key, made)
        if errors:
            raise errors[0]
        return results[0]

    def _write_here(self, writer: Writer, original: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        path = os.fspath(bound.arguments[writer.path]) if writer.path else ""
        is_whole = writer.is_staged and path.endswith(writer.suffixes or ("",))
        asks = os.path.lexists(path) and not bound.arguments.get("overwrite", True)  # Whether to, of what is there.
        if not is_whole or asks or self._thread.is_staging:
            return original(*bound.args, **bound.kwargs)
        with _set(self._thread, is_staging=True), staged(path, makes_folders=writer.makes_folders) as where:
            bound.arguments[writer.path] = where
            return original(*bound.args, **bound.kwargs)

    def _follow(
        self, writer: Writer, original: Callable[..., Any], bound: inspect.BoundArguments, outcome: Mapping[str, Any]
    ) -> Any:
        """Do all but writing; returns what the chief's call returned."""
        chiefs = value_of(outcome)
        if chiefs is None or not writer.keeps_books:
            return chiefs
        with _set(self._thread, is_following=True, chiefs=chiefs):
            if writer.owner is not tf.compat.v1.train.Saver:
                original(*bound.args, **bound.kwargs)
            elif bound.arguments.get("write_state", True):
                tf_adapter.note_saved(bound.args[0], chiefs)
        return chiefs


@contextmanager
def _set(thread: _Thread, **values: Any) -> Iterator[None]:
    before = {name: getattr(thread, name) for name in values}
    vars(thread).update(values)
    try:
        yield
    finally:
        vars(thread).update(before)
