"""The programs of `tower_sessions.py`, as `tf.distribute` has them: see `tower_references.py`."""

from typing import Any

import tensorflow as tf

from tests.support.distribute_cases import MEAN, STEPS, SUM
from tests.support.tower_data import dataset, gradients_of, images, logits_of, regression
from tests.support.tower_references import reference

v1 = tf.compat.v1


def of_graph(strategy: Any) -> Any:
    """A strategy for a session, on the same devices."""
    return v1.distribute.MirroredStrategy(
        list(strategy.extended.worker_devices), cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def in_session(strategy: Any) -> Any:
    with tf.Graph().as_default():
        strategy = of_graph(strategy)
        with strategy.scope():
            iterator = strategy.make_input_fn_iterator(lambda _: dataset())
            weights, bias = regression()
            step = v1.train.get_or_create_global_step()

            def replica_fn(batch: Any) -> Any:
                loss, slopes = gradients_of(batch, weights, bias)
                pairs = list(zip(slopes, [weights, bias], strict=True))
                return loss, v1.train.GradientDescentOptimizer(0.05).apply_gradients(pairs, global_step=step)

            loss, train = strategy.run(replica_fn, (iterator.get_next(),))
            total, train_op = strategy.reduce(SUM, loss, axis=None), strategy.group(train)
            found = [strategy.experimental_local_results(variable) for variable in (weights, bias, step)]
            with v1.Session(config=cpus(strategy)) as session:
                session.run([v1.global_variables_initializer(), iterator.initialize()])
                results = [session.run([total, train_op])[0] for _ in range(STEPS)]
                return results, session.run(found)


def cpus(strategy: Any) -> Any:
    return v1.ConfigProto(device_count={"CPU": strategy.num_replicas_in_sync})


@reference
def a_session_with_an_initializable_iterator(strategy: Any) -> Any:
    return in_session(strategy)


@reference
def a_function_in_a_session(strategy: Any) -> Any:
    return in_session(strategy)


@reference
def the_standard_pattern_in_a_session(strategy: Any) -> Any:
    with tf.Graph().as_default():
        strategy = of_graph(strategy)
        extended = strategy.extended
        with strategy.scope():
            weights, bias = regression()
            iterator = strategy.make_input_fn_iterator(lambda _: dataset())
            loss, slopes = strategy.run(lambda batch: gradients_of(batch, weights, bias), (iterator.get_next(),))
            sums = extended.batch_reduce_to(SUM, list(zip(slopes, [weights, bias], strict=True)))
            updates = [
                extended.update(v, lambda v, slope: v.assign_sub(0.05 * slope), (slope,))
                for v, slope in zip([weights, bias], sums, strict=True)
            ]
            train_op, mean = tf.group(*map(strategy.group, updates)), strategy.reduce(MEAN, loss, axis=None)
            found = [strategy.experimental_local_results(variable) for variable in (weights, bias)]
            with v1.Session(config=cpus(strategy)) as session:
                session.run([v1.global_variables_initializer(), iterator.initialize()])
                results = [session.run([mean, train_op])[0] for _ in range(STEPS)]
                return results, session.run(found)


@reference
def a_session_that_fetches_one_op_of_a_tower(strategy: Any) -> Any:
    with tf.Graph().as_default():
        strategy = of_graph(strategy)
        with strategy.scope():
            iterator = strategy.make_input_fn_iterator(lambda _: dataset())
            batch = iterator.get_next()
            v = v1.get_variable("v", [], initializer=v1.zeros_initializer())

            def replica_fn(batch: Any) -> Any:
                loss = tf.reduce_sum(batch[0]) + v
                return loss, v1.train.GradientDescentOptimizer(0.05).minimize(loss)

            loss, train = strategy.run(replica_fn, (batch,))
            read, losses = map(strategy.experimental_local_results, (v, loss))
            with v1.Session(config=cpus(strategy)) as session:
                session.run([v1.global_variables_initializer(), iterator.initialize()])
                found = [session.run(losses) for _ in range(2)]
                before = session.run(read)
                return found, before, [session.run(strategy.group(train)) for _ in range(2)] != [], session.run(read)


@reference
def a_published_training_loop(strategy: Any) -> Any:
    with tf.Graph().as_default():
        strategy = of_graph(strategy)
        rate = v1.get_variable("rate", [], initializer=v1.constant_initializer(0.1), trainable=False)
        with strategy.scope():
            optimizer = v1.train.MomentumOptimizer(rate, 0.8)
            iterator = strategy.make_input_fn_iterator(lambda _: dataset())
            weights, bias = regression()
            step = v1.train.get_or_create_global_step()

            def replica_fn(batch: Any) -> Any:
                loss = gradients_of(batch, weights, bias)[0]
                slopes = [tf.clip_by_norm(slope, 1.0) for slope in tf.gradients(loss, [weights, bias])]
                train_op = optimizer.apply_gradients(list(zip(slopes, [weights, bias], strict=True)), global_step=step)
                return train_op, (loss, loss * 2.0, loss + 1.0)

            train, losses = strategy.run(replica_fn, (iterator.get_next(),))
            fetched = [strategy.reduce(MEAN, each, axis=None) for each in losses]
            update_op = strategy.group(train)
            found = [strategy.experimental_local_results(variable) for variable in v1.global_variables()]
        with v1.Session(config=cpus(strategy)) as session:
            session.run([v1.global_variables_initializer(), iterator.initialize()])
            results = [session.run([fetched, update_op])[0] for _ in range(STEPS)]
            return results, session.run(found)


@reference
def a_published_example(strategy: Any) -> Any:
    with tf.Graph().as_default():
        strategy = of_graph(strategy)
        with strategy.scope():
            pixels, digits = images()

            def input_fn(_: Any) -> Any:
                return tf.data.Dataset.from_tensor_slices((pixels, digits)).shuffle(40, seed=3).repeat().batch(8)

            def replica_fn(features: Any, labels: Any) -> Any:
                with v1.variable_scope("net", reuse=v1.AUTO_REUSE):
                    logits = logits_of(features)
                loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
                optimizer = v1.train.AdamOptimizer(0.01)
                train_op = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
                return loss, train_op, v1.metrics.accuracy(labels, tf.argmax(logits, axis=1))[1]

            iterator = strategy.make_input_fn_iterator(input_fn)
            loss, train, seen = strategy.run(replica_fn, iterator.get_next())
            train_op, losses = (
                tf.group(strategy.group(train), strategy.group(seen)),
                strategy.experimental_local_results(loss),
            )
            trained = v1.global_variables() + v1.local_variables()
            found = [strategy.experimental_local_results(variable) for variable in trained]
            start = iterator.initialize()
            with v1.train.MonitoredTrainingSession(config=cpus(strategy)) as session:
                session.run(start)
                results = [session.run([losses, train_op])[0] for _ in range(STEPS)]
                return results, session.run(found)
