"""The session of graph mode: `tf.compat.v1.Session`'s interface over compiled programs, one per signature."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np
import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.capture.doors.graph import Signature
from autodist_py.program.kept_programs import Bound, KeptPrograms
from autodist_py.program.session_programs import Program, SessionPrograms
from autodist_py.proto.arguments import checked
from autodist_py.proto.errors import ClusterError, SessionError

_SESSION_ENDS = (tf.errors.AbortedError, tf.errors.UnavailableError)
"""By which a MonitoredSession takes its session for lost, and makes another by itself."""


class DistributedSession(tf_adapter.SessionInterface):
    """Runs a captured graph on the cluster; to be used as a `tf.compat.v1.Session` is.

    A run that trains is a step of all workers together, on the global batch. Any other run (an initializer, a loss,
    predictions, a variable) is done by this worker alone, on the whole of what it is fed.
    """

    def __init__(self, graph: tf.Graph, programs: SessionPrograms, kept: Bound, *, hooked: bool = False):
        """Run parts of `graph`, the user's, with what `programs` makes of them, of which so many are `kept`.

        One that is `hooked` runs a step with what the hooks of any worker fetch beside it.
        """
        self._graph = graph
        self._source = programs
        self._is_hooked = hooked
        self._programs = KeptPrograms[Signature, Program]("the session", kept)
        self.closed = False

    @property
    def graph(self) -> tf.Graph:
        """The user's graph, as it was captured."""
        return self._graph

    @checked("feed_dict", "options", error=SessionError)
    def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        options: tf.compat.v1.RunOptions | None = None,
        run_metadata: Any = None,
    ) -> Any:
        """Run `fetches`, in any structure of tensors, ops, variables and names; returns what one device would have.

        Args:
            fetches: what to run and return.
            feed_dict: values for tensors; those whose first dimension is unknown are batched, and shared out.
            options: `tf.compat.v1.RunOptions`; a timeout is refused.
            run_metadata: filled with what TensorFlow collected about the run, where `options` ask for a trace.

        Raises:
            SessionError: a feed or fetch that this session cannot serve, or one that needs a variable or a training
                op that was added to the graph after the session was made (initializers and savers may be).
            WorkerFailedError: another worker failed; the message names it.
            ClusterError: a hooked session cannot go on, and no worker can make another by itself.
        """
        self._require_usable(options)
        with tf_adapter.shapes_of_tensorflow_2():
            feeds = self._feeds(feed_dict or {})
        try:
            handler = tf_adapter.fetch_handler(self.graph, fetches)
        except (TypeError, ValueError) as error:
            raise SessionError(
                "everything that is fetched must be a tensor, op or variable of the session's graph, or the name of "
                f"one; received {fetches!r}. {error}"
            ) from error
        wanted = [_fetchable(tensor).name for tensor in handler.fetches()]
        signature = Signature(
            feeds=tuple(feeds),
            fetches=tuple(dict.fromkeys(wanted)),
            targets=tuple(op.name for op in handler.targets()),
        )
        is_traced = options is not None and options.trace_level != tf.compat.v1.RunOptions.NO_TRACE
        with self._kept_by_monitors(), tf_adapter.run_metadata(run_metadata if is_traced else None):
            values = self._values(signature, list(feeds.values()))
        return handler.build_results(self, [_plain(values[name]) for name in wanted])

    def _values(self, signature: Signature, feeds: list[tf.Tensor]) -> dict[str, Any]:
        """The value of each fetch, and of those that other workers asked for."""
        with tf_adapter.eagerly():
            with tf_adapter.shapes_of_tensorflow_2():
                signature = self._source.agreed(signature, hooked=self._is_hooked)
                program = self._programs.use(signature)
                if program is None:
                    program = self._source.make(signature, feeds)
                    self._programs.add(signature, program, program.goes_among)
            return dict(zip(signature.fetches, program.run(feeds), strict=True))

    @contextmanager
    def _kept_by_monitors(self) -> Iterator[None]:
        """A MonitoredSession is not told what it would take for a reason to make another session."""
        try:
            yield
        except _SESSION_ENDS as error:
            if not self._is_hooked:
                raise
            raise ClusterError(
                f"the session cannot go on, and one worker cannot make another by itself: {error.message}. Start the "
                "run again: SessionCreator(autodist, checkpoint_dir=...) goes on from the last checkpoint"
            ) from error

    def of_chief(self, value: str) -> str:
        """The chief's `value`; every worker calls it."""
        return self._source.of_chief(value)

    def take_chiefs_values(self, variables: Iterable[str]) -> None:
        """Give the variables of these names the chief's values; every worker calls it, and has values for them."""
        with tf_adapter.eagerly():
            self._source.take_chiefs_values(variables)

    @property
    def sess_str(self) -> str:
        """What the session runs on, which TensorFlow's calls the target: this process."""
        return ""

    @property
    def graph_def(self) -> tf.compat.v1.GraphDef:
        """The user's graph, as a message."""
        return self._graph.as_graph_def(add_shapes=True)

    @checked("feed_list", error=SessionError)
    def make_callable(self, fetches: Any, feed_list: Sequence[Any] | None = None) -> Callable[..., Any]:
        """A function that runs `fetches`, fed with its arguments in the order of `feed_list`."""
        keys = list(feed_list or ())

        def call(*values: Any) -> Any:
            return self.run(fetches, dict(zip(keys, values, strict=True)))

        return call

    def close(self) -> None:
        """Let go of the programs and of the variables' values."""
        self.closed = True
        self._programs.clear()
        self._source.close()

    def as_default(self) -> AbstractContextManager[Any]:
        """Within it `eval()` of tensors and `run()` of ops use this session."""
        return tf_adapter.default_session(self)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.graph.as_default())
            stack.enter_context(self.as_default())
            self._contexts = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.__exit__(kind, error, trace)
        self.close()

    def _require_usable(self, options: Any) -> None:
        if self.closed:
            raise SessionError("the session is closed; create another with create_distributed_session()")
        if options is not None and options.timeout_in_ms:
            raise SessionError("a run of a distributed session takes no timeout; set timeout_in_ms to 0")

    def _feeds(self, feed_dict: Mapping[Any, Any]) -> dict[str, tf.Tensor]:
        """The fed values by tensor name, sorted, checked against the graph and with each other."""
        feeds: dict[str, tf.Tensor] = {}
        batched: dict[str, int] = {}
        for key, value in feed_dict.items():
            try:
                target = self.graph.as_graph_element(key, allow_operation=False)
            except (TypeError, ValueError, KeyError) as error:
                raise SessionError(
                    f"only tensors of the session's graph can be fed; received the key {key!r}. {error}"
                ) from error
            feeds[target.name] = _value(target, value)
            if target.shape.rank and target.shape[0] is None:
                batched[target.name] = feeds[target.name].shape[0]
        if len(set(batched.values())) > 1:
            raise SessionError(
                "all batched feeds (those whose first dimension is unknown) must have the same number of examples; "
                f"received {', '.join(f'{name}: {size}' for name, size in sorted(batched.items()))}"
            )
        return dict(sorted(feeds.items()))


def _fetchable(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype in (tf.resource, tf.variant):
        raise SessionError(
            f"'{tensor.name}' is a handle ({tensor.dtype.name}), which has no value to fetch; fetch the variable "
            "itself, or the tensor that reads it"
        )
    return tensor


def _value(target: tf.Tensor, value: Any) -> tf.Tensor:
    """`value` as a tensor that may stand for `target`."""
    with tf_adapter.eagerly():
        if isinstance(value, tf.Tensor):
            tensor = value
        else:
            tensor = tf.convert_to_tensor(np.asarray(value, dtype=target.dtype.as_numpy_dtype))
    if not target.shape.is_compatible_with(tensor.shape) or tensor.dtype != target.dtype:
        raise SessionError(
            f"a value of shape {tensor.shape} and type {tensor.dtype.name} cannot be fed to '{target.name}', which has "
            f"shape {target.shape} and type {target.dtype.name}"
        )
    return tensor


def _plain(value: Any) -> Any:
    return value.numpy() if isinstance(value, tf.Tensor) else value
