"""`SyncReplicasOptimizer`: TensorFlow's, whose updates wait for some of the workers' gradients, in an AutoDist's scope.

What TensorFlow makes of accumulators and a queue the parameter server does: see `servers/update_rules.py`, `Tokens`.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from autodist_py.capture.doors.graph import GraphScope, Synchronized
from autodist_py.capture.tf_adapter import current_scope
from autodist_py.proto.errors import CaptureError

v1 = tf.compat.v1


class SyncReplicasOptimizer(tf.compat.v1.train.Optimizer):
    """What `tf.compat.v1.train.SyncReplicasOptimizer` is, with its arguments, methods and meaning.

    It is made and used in `autodist.scope()`. What `apply_gradients` is given is each worker's own, also what is
    clipped. An update is the plain average of the first `replicas_to_aggregate` gradients. Those of older values are
    dropped.

    Args:
        opt: the optimizer that updates.
        replicas_to_aggregate: how many gradients an update waits for.
        total_num_replicas: how many workers there are; None: as many.
        variable_averages: a `tf.compat.v1.train.ExponentialMovingAverage`, kept after each update.
        variables_to_average: the variables whose averages it keeps.
        use_locking: as TensorFlow's; an update is whole here in any case.
        name: of the ops.
    """

    def __init__(
        self,
        opt: Any,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: Any = None,
        variables_to_average: Any = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
    ):
        super().__init__(use_locking, name)
        self._opt = opt
        self._wanted = replicas_to_aggregate
        self._total = replicas_to_aggregate if total_num_replicas is None else total_num_replicas
        self._averages, self._averaged = variable_averages, variables_to_average
        self._synchronized: Synchronized | None = None

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's gradients, each worker's own.

        Raises:
            CaptureError: outside of `scope()`.
        """
        _scope("compute_gradients")
        return self._opt.compute_gradients(*args, **kwargs)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> Any:
        """The op that sends this worker's gradients, and waits until it may go on.

        Raises:
            ValueError: there are no gradients, or no global step.
            CaptureError: outside of `scope()`; a second time in a graph; or a gradient is sparse.
        """
        pairs = list(grads_and_vars)
        if not pairs:
            raise ValueError("Must supply at least one variable: minimize a loss that depends on some")
        if global_step is None:
            raise ValueError(
                "Global step is required to check staleness: give global_step="
                "tf.compat.v1.train.get_or_create_global_step()"
            )
        scope = _scope("apply_gradients")
        if scope.synchronized is not None:
            raise CaptureError(
                "a graph has one SyncReplicasOptimizer, whose gradients are applied once: workers wait for one update. "
                "Give all gradients to one apply_gradients"
            )
        for gradient, variable in pairs:
            _require_dense(gradient, variable)
        local_step = v1.Variable(
            0,
            trainable=False,
            collections=[v1.GraphKeys.LOCAL_VARIABLES],
            dtype=global_step.dtype.base_dtype,
            name="sync_rep_local_step",
        )
        self.local_step_init_op = local_step.assign(global_step).op
        self.chief_init_op = tf.group(self.local_step_init_op)
        self.ready_for_local_init_op = v1.report_uninitialized_variables(v1.global_variables())
        marked = [(None if one is None else scope.averaged(variable, one), variable) for one, variable in pairs]
        update = self._opt.apply_gradients(marked, name=name)
        # How many updates there were is the server's to say: the count is computed of what only the server has.
        first = next(gradient for gradient, _ in marked if gradient is not None)
        once = tf.cast(tf.minimum(tf.raw_ops.Size(input=first) + 1, 1), global_step.dtype.base_dtype)
        with tf.control_dependencies([update]):
            done = global_step.assign_add(once).op
        if self._averages is not None:
            with tf.control_dependencies([done]):
                done = self._averages.apply(self._averaged)
        queue = tf.queue.FIFOQueue(-1, global_step.dtype.base_dtype, shapes=(), name="sync_token_q")
        with tf.name_scope(""):
            self._runner = _IdleQueueRunner(queue, [tf.no_op(name="sync_replicas_by_server")])
        with tf.control_dependencies([done]):
            train = local_step.assign(global_step.read_value())
        self._synchronized = scope.synchronized = Synchronized(self._wanted, self._total)
        return train

    def get_chief_queue_runner(self) -> Any:
        """A queue runner whose threads do nothing: the server updates.

        Raises:
            ValueError: before `apply_gradients`.
        """
        self._require_applied("get_chief_queue_runner()")
        return self._runner

    def get_init_tokens_op(self, num_tokens: int = -1) -> tf.Operation:
        """An op that does nothing: from now on a run begins with so many tokens; -1: `replicas_to_aggregate`.

        Raises:
            ValueError: before `apply_gradients`, or there are too few to finish the first step.
        """
        synchronized = self._require_applied("get_init_tokens_op()")
        needed = self._wanted - self._total
        if num_tokens == -1:
            num_tokens = self._wanted
        elif num_tokens < needed:
            raise ValueError(
                f"Too few tokens to finish the first step: {num_tokens} (given) vs {needed} (needed); give num_tokens="
                f"{needed}, or more"
            )
        synchronized.first_tokens = max(num_tokens, 0)
        return tf.no_op(name="init_tokens")

    def make_session_run_hook(self, is_chief: bool, num_tokens: int = -1) -> tf.compat.v1.train.SessionRunHook:
        """A hook that sets this worker's step when a session is made; every worker has one."""
        return _Hook(self, is_chief, num_tokens)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._opt.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._opt.get_slot_names(*args, **kwargs)

    def variables(self) -> Any:
        """The wrapped optimizer's; not this worker's step."""
        return self._opt.variables()

    def _require_applied(self, what: str) -> Synchronized:
        if self._synchronized is None:
            raise ValueError(f"{what} should be called after apply_gradients(), or minimize()")
        return self._synchronized


class _Hook(tf.compat.v1.train.SessionRunHook):
    """See `make_session_run_hook`."""

    def __init__(self, optimizer: SyncReplicasOptimizer, is_chief: bool, num_tokens: int):
        self._optimizer, self._is_chief, self._num_tokens = optimizer, is_chief, num_tokens

    def begin(self) -> None:
        """Make the ops. The tokens are the same on every worker, so that all have one graph."""
        optimizer = self._optimizer
        optimizer._require_applied("the hook of make_session_run_hook()")
        optimizer.get_init_tokens_op(self._num_tokens)
        self._init_op = optimizer.chief_init_op if self._is_chief else optimizer.local_step_init_op
        self._ready_op = optimizer.ready_for_local_init_op

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Set this worker's step to the global one."""
        missing = session.run(self._ready_op)
        if missing.size:
            raise RuntimeError(
                "Init operations did not make model ready for SyncReplicasOptimizer local_init. Init op: "
                f"{self._init_op.name}, variables not initialized: {missing.tolist()}"
            )
        session.run(self._init_op)


class _IdleQueueRunner(tf.compat.v1.train.QueueRunner):
    """Starts no threads."""

    def create_threads(self, sess: Any, coord: Any = None, daemon: bool = False, start: bool = False) -> list[Any]:
        """None."""
        return []


def _require_dense(gradient: Any, variable: Any) -> None:
    """Refuse what cannot be averaged; None passes."""
    if isinstance(gradient, tf.IndexedSlices):
        raise CaptureError(
            f"the gradient of '{variable.name}' is sparse. TensorFlow's accumulators divide each row by the number of "
            "gradients that have it, which is not done here. Give tf.convert_to_tensor(gradient), whose rows count "
            "as zeros where a worker has none"
        )
    if gradient is not None and not isinstance(gradient, tf.Tensor):
        raise ValueError(f"Unknown grad type! A gradient is a tensor or None; received {type(gradient).__name__}")


def _scope(what: str) -> GraphScope:
    scope = current_scope()
    if scope is None:
        raise CaptureError(
            f"{what} of SyncReplicasOptimizer was called outside of scope(), where no server averages. Build the graph "
            "as `with tf.Graph().as_default(), autodist.scope():`"
        )
    found: GraphScope = scope
    return found
