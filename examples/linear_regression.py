"""Linear regression in graph mode: TF1-style code for one device, trained by every worker of the cluster.

Ways to run it:

    python examples/linear_regression.py                          one worker
    autodist run --local 2 examples/linear_regression.py          two workers
"""

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist

STEPS = 200
BATCH_SIZE = 64
TRUE_SLOPE, TRUE_INTERCEPT = 3.0, 2.0


def main() -> None:
    autodist = AutoDist(seed=1)

    rng = np.random.default_rng(seed=1)
    inputs = rng.normal(size=1000).astype(np.float32)
    targets = TRUE_SLOPE * inputs + TRUE_INTERCEPT + rng.normal(scale=0.1, size=1000).astype(np.float32)

    with tf.Graph().as_default(), autodist.scope():
        x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
        y = tf.compat.v1.placeholder(tf.float32, [None], name="y")
        slope = tf.compat.v1.get_variable("slope", initializer=0.0)
        intercept = tf.compat.v1.get_variable("intercept", initializer=0.0)

        loss = tf.reduce_mean(tf.square(slope * x + intercept - y))
        train_op = tf.compat.v1.train.GradientDescentOptimizer(learning_rate=0.1).minimize(loss)

        session = autodist.create_distributed_session()
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(STEPS):
            batch = rng.choice(len(inputs), BATCH_SIZE)
            _, batch_loss = session.run([train_op, loss], feed_dict={x: inputs[batch], y: targets[batch]})
        learnt_slope, learnt_intercept = session.run([slope, intercept])

    if autodist.is_chief:
        print(f"loss {batch_loss:.4f} after {STEPS} steps on {autodist.num_workers} workers")
        print(f"y = {learnt_slope:.3f} x + {learnt_intercept:.3f}  (made with {TRUE_SLOPE} and {TRUE_INTERCEPT})")
    autodist.close()


if __name__ == "__main__":
    main()
