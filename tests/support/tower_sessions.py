"""Programs of the tower API in sessions, as TensorFlow 1 has them: see `tower_programs.py`."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from autodist_py.distribute import towers
from tests.support.distribute_cases import STEPS
from tests.support.tower_data import NETWORK, dataset, gradients_of, images, logits_of, regression
from tests.support.tower_programs import program

v1 = tf.compat.v1


def in_session(d: towers.MirroredStrategy, make_iterator: Callable[[Any], Any], wrap: Callable[..., Any]) -> Any:
    with tf.Graph().as_default(), d.scope():
        iterator = make_iterator(d.distribute_dataset(dataset))
        weights, bias = regression()
        step = v1.train.get_or_create_global_step()

        def tower_fn(batch: Any) -> Any:
            loss, slopes = gradients_of(batch, weights, bias)
            pairs = list(zip(slopes, [weights, bias], strict=True))
            return loss, v1.train.GradientDescentOptimizer(0.05).apply_gradients(pairs, global_step=step)

        loss, train_ops = wrap(lambda batch: d.call_for_each_tower(tower_fn, batch))(iterator.get_next())
        total, train_op = d.reduce("sum", loss, "/cpu:0"), tf.group(d.unwrap(train_ops))
        found = [d.unwrap(variable) for variable in (weights, bias, step)]
        config = v1.ConfigProto()
        d.configure(config)
        with v1.Session(config=config) as session:
            session.run([v1.global_variables_initializer(), getattr(iterator, "initializer", tf.no_op())])
            results = [session.run([total, train_op])[0] for _ in range(STEPS)]
            return results, session.run(found)


@program
def a_session_with_an_initializable_iterator(d: towers.MirroredStrategy) -> Any:
    return in_session(d, v1.data.make_initializable_iterator, lambda step: step)


@program
def a_function_in_a_session(d: towers.MirroredStrategy) -> Any:
    return in_session(d, lambda made: made.make_initializable_iterator(), tf.function)


@program
def the_standard_pattern_in_a_session(d: towers.MirroredStrategy) -> Any:
    with tf.Graph().as_default(), d.scope():
        weights, bias = regression()
        batch = v1.data.make_one_shot_iterator(d.distribute_dataset(dataset)).get_next()
        loss, slopes = d.call_for_each_tower(lambda batch: gradients_of(batch, weights, bias), batch)
        sums = d.batch_reduce("sum", list(zip(slopes, [weights, bias], strict=True)))
        rate = d.broadcast(tf.constant(0.05))
        update_fn = lambda v, slope, rate: v.assign_sub(rate * slope)  # noqa: E731
        updates = [d.update(v, update_fn, slope, rate) for v, slope in zip([weights, bias], sums, strict=True)]
        train_op, mean = tf.group(*map(d.group, updates)), d.fetch(d.reduce("mean", loss), d.worker_devices[-1])
        found = [d.unwrap(variable) for variable in (weights, bias)]
        config = v1.ConfigProto()
        d.configure(config)
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            results = [session.run([mean, train_op])[0] for _ in range(STEPS)]
            return results, session.run(found)


@program
def a_session_that_fetches_one_op_of_a_tower(d: towers.MirroredStrategy) -> Any:
    """What it does not fetch is not run, so the variable is as it was."""
    with tf.Graph().as_default(), d.scope():
        batch = v1.data.make_one_shot_iterator(d.distribute_dataset(dataset)).get_next()
        v = v1.get_variable("v", [], initializer=v1.zeros_initializer())

        def tower_fn(batch: Any) -> Any:
            loss = tf.reduce_sum(batch[0]) + v
            return loss, v1.train.GradientDescentOptimizer(0.05).minimize(loss)

        loss, train_ops = d.call_for_each_tower(tower_fn, batch)
        config = v1.ConfigProto()
        d.configure(config)
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            losses = [session.run(d.unwrap(loss)) for _ in range(2)]
            before = session.run(d.unwrap(v))
            return losses, before, [session.run(d.group(train_ops)) for _ in range(2)] != [], session.run(d.unwrap(v))


@program
def a_published_training_loop(d: towers.MirroredStrategy) -> Any:
    """Towers clip gradients, an optimizer applies them in the cross-tower context, and losses go to one device."""
    with tf.Graph().as_default():
        rate = v1.get_variable("rate", [], initializer=v1.constant_initializer(0.1), trainable=False)
        central = d.parameter_devices[0]
        with d.scope():
            optimizer = v1.train.MomentumOptimizer(rate, 0.8)
            inputs = d.distribute_dataset(dataset).make_one_shot_iterator().get_next()
            weights, bias = regression()
            step = v1.train.get_or_create_global_step()

            def grads_fn(batch: Any) -> Any:
                loss = gradients_of(batch, weights, bias)[0]
                pairs = optimizer.compute_gradients(loss, [weights, bias])
                return [(tf.clip_by_norm(slope, 1.0), v) for slope, v in pairs], loss, (loss * 2.0, loss + 1.0)

            pairs, loss, losses = d.call_for_each_tower(grads_fn, inputs)
            total = d.reduce(tf.VariableAggregation.MEAN, loss, central)
            reduced = d.batch_reduce(tf.VariableAggregation.MEAN, [(each, central) for each in losses])
            update_op = optimizer._distributed_apply(d, pairs, global_step=step)
            fetched = [d.unwrap(each)[0] for each in (total, *reduced)]
            found = [d.unwrap(variable) for variable in v1.global_variables()]
        config = v1.ConfigProto()
        d.configure(config)
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            results = [session.run([fetched, update_op])[0] for _ in range(STEPS)]
            return results, session.run(found)


@program
def a_published_example(d: towers.MirroredStrategy) -> Any:
    """A convolutional network that Adam trains, as examples of TensorFlow 1.10 were written: data is fed."""
    with tf.Graph().as_default(), d.scope():
        fed = [v1.placeholder(tf.float32, [None, 64]), v1.placeholder(tf.int32, [None])]

        def input_fn() -> Any:
            return v1.data.Dataset.from_tensor_slices(tuple(fed)).shuffle(40, seed=3).repeat().batch(8)

        def tower_fn(features: Any, labels: Any) -> Any:
            with v1.variable_scope("net", reuse=v1.AUTO_REUSE):
                logits = logits_of(features)
            loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
            optimizer = v1.train.AdamOptimizer(0.01)
            train_op = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
            return loss, train_op, v1.metrics.accuracy(labels, tf.argmax(logits, axis=1))[1]

        iterator = d.distribute_dataset(input_fn).make_initializable_iterator()
        loss, tower_train_ops, seen = d.call_for_each_tower(tower_fn, *iterator.get_next())
        train_op, losses = tf.group(d.unwrap(tower_train_ops), d.unwrap(seen)), d.unwrap(loss)
        found = [d.unwrap(variable) for variable in v1.global_variables() + v1.local_variables()]
        config = v1.ConfigProto()
        d.configure(config)
        with v1.train.MonitoredTrainingSession(config=config) as session:
            pixels, digits = images()
            session.run(iterator.initializer, feed_dict={fed[0]: pixels, fed[1]: digits})
            results = [session.run([losses, train_op])[0] for _ in range(STEPS)]
            values = session.run(found)
    assert len(found) == len(NETWORK) * 3 + 3 + 2
    return results, values
