"""`GraphMode`: the one graph that an AutoDist object captures in graph mode, and the session over it."""

import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.graph import GraphScope
from autodist_py.program.kept_programs import Bound
from autodist_py.program.mode import Mode
from autodist_py.program.session import DistributedSession
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.tf_adapter import shapes_of_tensorflow_2


class GraphMode:
    """See the module."""

    def __init__(self, options: CaptureOptions, seed: int | None, kept: Bound):
        """No graph is captured yet.

        Args:
            options: what the user said about the batch.
            seed: of the graph's random numbers; None: the user's, or none.
            kept: how many programs a session keeps.
        """
        self._options, self._seed, self._kept = options, seed, kept
        self._scope: GraphScope | None = None
        self._session: DistributedSession | None = None

    def scope(self) -> GraphScope:
        """What is captured of the default graph.

        Raises:
            CaptureError: it is another graph than before.
        """
        graph = tf.compat.v1.get_default_graph()
        if self._scope is None:
            self._scope = GraphScope(graph, self._options, seed=self._seed)
        elif self._scope.graph is not graph:
            raise CaptureError(
                "scope() was entered with another graph than before; one AutoDist object compiles one graph. "
                "Close this one and make another AutoDist for the second graph"
            )
        return self._scope

    def session(self, mode: Mode, *, hooked: bool = False) -> DistributedSession:
        """A session over the captured graph, whose programs `mode` makes; `hooked`: see DistributedSession.

        Raises:
            CaptureError: no graph was captured; or there is an open session already.
        """
        if self._scope is None:
            raise CaptureError(
                "create_distributed_session() is for graph mode, and no graph was built in scope(). Build it there: "
                "with tf.Graph().as_default(), autodist.scope(): ...; for TF2 steps use @autodist.function"
            )
        if self._session is not None and not self._session.closed:
            raise CaptureError(
                "this AutoDist has an open session already; close it first, or make another AutoDist for another graph"
            )
        with shapes_of_tensorflow_2():
            programs = mode.session_programs(self._scope)
            self._session = DistributedSession(self._scope.graph, programs, self._kept, hooked=hooked)
        return self._session

    def item(self) -> GraphItem:
        """The graph, as it was captured.

        Raises:
            CaptureError: none was.
        """
        if self._scope is None:
            raise CaptureError("build_strategy() needs a graph built in scope(), or a step function and its arguments")
        with shapes_of_tensorflow_2():
            return self._scope.item(self._options)

    def close(self) -> None:
        """Let go of the graph, and end the session."""
        if self._session is not None:
            self._session.close()
        if self._scope is not None:
            self._scope.close()
