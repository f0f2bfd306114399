"""`SessionCreator`: TensorFlow's monitored sessions, and their hooks, over the distributed session of an AutoDist."""

import os
from typing import Any

import tensorflow as tf

from autodist_py.autodist import AutoDist
from autodist_py.program.session import DistributedSession
from autodist_py.proto.arguments import checked
from autodist_py.proto.errors import SessionError

_Path = str | os.PathLike[str]
v1 = tf.compat.v1


class SessionCreator(tf.compat.v1.train.SessionCreator):
    """What `tf.compat.v1.train.ChiefSessionCreator` is, on every worker, for `tf.compat.v1.train.MonitoredSession`.

    The chief restores the last checkpoint, or initializes; the others have its values when `create_session` returns.
    A run that trains is a step of all workers. What hooks of any worker fetch beside it is fetched on all, so that a
    worker may have hooks of its own.

    Args:
        autodist: whose `scope()` the graph was built in.
        scaffold: as for TensorFlow's; None: one that is made of the graph's collections.
        checkpoint_dir: a directory whose last checkpoint is restored, if there is one. The chief's counts.
        checkpoint_filename_with_path: a checkpoint that is restored.

    Raises:
        SessionError: something given is of another type.
        ValueError: both a directory and a checkpoint are given.
    """

    @checked("autodist", "checkpoint_dir", "checkpoint_filename_with_path", error=SessionError)
    def __init__(
        self,
        autodist: AutoDist,
        scaffold: Any = None,
        *,
        checkpoint_dir: _Path | None = None,
        checkpoint_filename_with_path: _Path | None = None,
    ):
        if checkpoint_dir and checkpoint_filename_with_path:
            raise ValueError(
                "give checkpoint_dir, whose last checkpoint is restored, or checkpoint_filename_with_path; received "
                f"{os.fspath(checkpoint_dir)!r} and {os.fspath(checkpoint_filename_with_path)!r}"
            )
        self._autodist = autodist
        self._scaffold = v1.train.Scaffold() if scaffold is None else scaffold
        self._directory, self._path = checkpoint_dir, checkpoint_filename_with_path

    def create_session(self) -> DistributedSession:
        """A session whose variables have values: the checkpoint's, or their initial ones. All workers call it.

        Raises:
            CaptureError: no graph was built in `scope()`; or there is an open session already.
            SessionError: the default graph is another one.
            RuntimeError: variables have no value after what should initialize them.
        """
        self._scaffold.finalize()
        session = self._autodist.create_distributed_session(hooked=True)
        if session.graph is not v1.get_default_graph():
            session.close()
            raise SessionError(
                "a monitored session is made under the graph that was built in scope(); the default graph is another. "
                "Make it within the same `with tf.Graph().as_default():`"
            )
        is_restored = self._restored(session)
        if not (is_restored and self._autodist.is_chief):
            session.run(self._scaffold.init_op, self._scaffold.init_feed_dict)
            if self._scaffold.init_fn is not None:
                self._scaffold.init_fn(session)
        _require_ready(session, self._scaffold.ready_for_local_init_op, "ready for local_init", self._scaffold)
        session.run(self._scaffold.local_init_op, self._scaffold.local_init_feed_dict)
        _require_ready(session, self._scaffold.ready_op, "ready", self._scaffold)
        session.take_chiefs_values(_shared_variables())
        return session

    def _restored(self, session: DistributedSession) -> bool:
        """Whether the chief has restored a checkpoint."""
        path, earlier = self._checkpoint() if self._autodist.is_chief else (None, [])
        if path is not None:
            if initializers := v1.get_collection("saved_model_initializers"):
                session.run(initializers)
            self._scaffold.saver.restore(session, path)
            self._scaffold.saver.recover_last_checkpoints(earlier)
        return bool(session.of_chief(path or ""))

    def _checkpoint(self) -> tuple[str | None, list[str]]:
        """What is restored, and the checkpoints that a saver counts among its own."""
        if self._path is not None:
            return os.fspath(self._path), []
        state = tf.train.get_checkpoint_state(os.fspath(self._directory)) if self._directory else None
        if state is None or not state.model_checkpoint_path:
            return None, []
        return state.model_checkpoint_path, list(state.all_model_checkpoint_paths)


def _require_ready(session: DistributedSession, report: Any, what: str, scaffold: Any) -> None:
    """Refuse variables that have no value, as TensorFlow's SessionManager does: `report` gives their names."""
    if report is None:
        return
    missing = session.run(report)
    if missing is None or missing.dtype == "int32" or not missing.size:
        return
    names = ", ".join(sorted({name.decode() for name in missing}))
    init_op = getattr(scaffold.init_op, "name", scaffold.init_op)
    raise RuntimeError(
        f"Init operations did not make model {what}. Init op: {init_op}, init fn: {scaffold.init_fn}. "
        f"Variables not initialized: {names}. Give Scaffold an init_op that initializes them"
    )


def _shared_variables() -> list[str]:
    """The default graph's variables, but for strings, which each worker has initialized itself."""
    graph = v1.get_default_graph()
    keys = (v1.GraphKeys.GLOBAL_VARIABLES, v1.GraphKeys.LOCAL_VARIABLES)
    variables = {one.op.name: one for key in keys for one in graph.get_collection(key)}
    return sorted(name for name, one in variables.items() if one.dtype.base_dtype != tf.string)
