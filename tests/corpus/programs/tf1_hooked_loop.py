"""A loop as MonitoredTrainingSession has it, by hand: `SessionRunHook`s that fetch beside the step, and stop it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, wines
from tests.corpus.header import Header, Seen

HEADER = Header("TF1", "graph session", sizes=(8, 5, 7))
v1 = tf.compat.v1


class LossHistory(tf.compat.v1.train.SessionRunHook):
    """Fetches the loss beside each step, and feeds the rate that follows from it."""

    def __init__(self, loss: tf.Tensor, rate: tf.Tensor):
        self._loss, self._rate = loss, rate
        self.values: list[float] = []

    def before_run(self, run_context: Any) -> Any:
        rate = 0.1 if len(self.values) < 3 else 0.05
        return v1.train.SessionRunArgs(self._loss, {self._rate: np.array(rate)})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.values.append(float(run_values.results))


class HookedSession:
    """Runs a session with hooks: their fetches and feeds travel with those of each run."""

    def __init__(self, session: Any, hooks: Sequence[Any]):
        self._session, self._hooks = session, hooks
        self._should_stop = False
        for hook in hooks:
            hook.after_create_session(session, None)

    def should_stop(self) -> bool:
        return self._should_stop

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any]) -> Any:
        context = v1.train.SessionRunContext(v1.train.SessionRunArgs(fetches, feed_dict), self._session)
        asked = {number: made for number, hook in enumerate(self._hooks) if (made := hook.before_run(context))}
        fed = dict(feed_dict)
        for made in asked.values():
            fed |= made.feed_dict or {}
        wanted = {str(number): made.fetches for number, made in asked.items()}
        found = self._session.run({"caller": fetches, **wanted}, fed)
        for number, hook in enumerate(self._hooks):
            hook.after_run(context, v1.train.SessionRunValues(found.get(str(number)), None, None))
        self._should_stop = context.stop_requested
        return found["caller"]


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    initial = rng(63)
    with tf.Graph().as_default(), autodist.scope():
        x, y = v1.placeholder(tf.float64, [None, 13]), v1.placeholder(tf.int64, [None])
        rate = v1.placeholder(tf.float64, [])
        kernel = v1.get_variable("kernel", initializer=0.2 * initial.normal(size=(13, 3)))
        bias = v1.get_variable("bias", initializer=np.zeros(3))
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x @ kernel + bias))
        steps = v1.train.get_or_create_global_step()
        train_op = v1.train.MomentumOptimizer(rate, 0.9).minimize(loss, global_step=steps)
        history = LossHistory(loss, rate)
        hooks = [history, v1.train.StopAtStepHook(last_step=5), v1.train.NanTensorHook(loss)]
        for hook in hooks:
            hook.begin()
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            hooked = HookedSession(session, hooks)
            while not hooked.should_stop():
                for one, other in batches(header.sizes, *wines()):
                    if not hooked.should_stop():
                        hooked.run(train_op, {x: one, y: other})
                        yield Seen([history.values[-1], session.run(steps)], (session,))
            for hook in hooks:
                hook.end(session)
