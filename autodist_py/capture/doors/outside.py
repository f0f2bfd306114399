"""Training in `scope()` that no door of capture sees: with several workers it is refused, as each would train alone.

Two places see all of it: where gradients of variables are computed, and where a session of TensorFlow's own is asked
for an op that trains. What each worker may do by itself (read, evaluate, initialize) passes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.errors import CaptureError, SessionError

_STRATEGY_ADVICE = (
    "AutoDist distributes a step of one device: leave the tf.distribute strategy out, and say what to use in the "
    "resource spec"
)


def require_no_strategy(what: str) -> None:
    """Refuse what is done under a strategy of TensorFlow's own.

    Raises:
        CaptureError: `what` is.
    """
    if tf.distribute.has_strategy():
        name = type(tf.distribute.get_strategy()).__name__
        raise CaptureError(
            f"{what} under tf.distribute's {name}, which would share out the batch once more. {_STRATEGY_ADVICE}"
        )


@contextmanager
def refused_gradients(captured: tf.Graph | None) -> Iterator[None]:
    """Within this context gradients of variables are computed in steps that are captured, and in the graph `captured`.

    Raises:
        CaptureError: a gradient of a variable is computed elsewhere: eagerly, in a function or in another graph.
    """

    def on_gradients(
        compute: tf_adapter.Compute, sources: Sequence[Any], targets: Sequence[Any], *, is_taped: bool
    ) -> list[Any]:
        trained = next((source for source in sources if tf_adapter.is_variable(source)), None)
        if trained is not None and not tf_adapter.is_captured(captured):
            raise CaptureError(
                f"the gradient of variable '{getattr(trained, 'path', None) or trained.name}' is computed in scope(), "
                "and not in a step that is distributed, so that every worker would train by itself. Put the step "
                "under @autodist.function, fit a Keras model that is compiled in scope(), or build a graph as `with "
                "tf.Graph().as_default(), autodist.scope():` and run it in create_distributed_session(). What each "
                "worker is to do by itself stands outside of scope()"
            )
        return compute(())

    with tf_adapter.gradient_calls(on_gradients, nullcontext):
        yield


class SessionGuard:
    """Keeps sessions of TensorFlow's own from training with one captured graph."""

    def __init__(self, graph: tf.Graph, gradients: Callable[[], Sequence[str]]):
        """Guard `graph`; `gradients` gives the names of the recorded gradients' tensors."""
        self._graph, self._gradients = graph, gradients
        self._version = -1
        self._trains: dict[str, str | None] = {}
        self._view: GraphView | None = None
        self._writers: set[str] = set()
        tf_adapter.on_fetch(graph, self._require_no_training)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this context also what Keras runs in graph mode is seen, which is no fetch."""
        with ExitStack() as stack:
            stack.enter_context(tf_adapter.callables_of(self._graph, self._require_no_training))
            yield

    def close(self) -> None:
        """The graph is an ordinary one again."""
        tf_adapter.on_fetch(self._graph, None)

    def _require_no_training(self, op: str) -> None:
        writer = self._trained_by(op)
        if writer is not None:
            raise SessionError(
                f"'{op}' runs '{writer}', which trains, in a session of TensorFlow's own (Session, "
                "MonitoredTrainingSession and their like, or Keras's in graph mode), so that every worker would train "
                "by itself. Run it in autodist.create_distributed_session(), or in MonitoredSession(session_creator="
                "autodist_py.distribute.SessionCreator(autodist)). A session of one worker's own may read, evaluate "
                "and save"
            )

    def _trained_by(self, op: str) -> str | None:
        """An op that writes a variable with what is made of gradients, and that `op` needs; None: there is none."""
        if self._graph.version != self._version or self._view is None:
            self._version, self._trains = self._graph.version, {}
            self._view = view = GraphView(self._graph.as_graph_def())
            reached = view.dataflow_descendants({op_of(tensor) for tensor in self._gradients()})
            self._writers = {writer for names in view.writes.values() for writer in names} & reached
        if op not in self._trains:
            self._trains[op] = min(self._view.ancestors([op]) & self._writers, default=None)
        return self._trains[op]
