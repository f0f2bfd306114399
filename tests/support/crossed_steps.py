"""Steps of which parts on servers and parts of collectives depend on one another crosswise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.kernel.pipeline import CompiledProgram, compile
from autodist_py.kernel.program import Options
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.support import capture_steps, kernel_programs


class CrossedStep:
    """Variables, and a step over them that returns losses.

    Attributes:
        on_servers: the variables that are to live on servers, each with the server's rank, where the parts cross.
    """

    on_servers: dict[str, int]

    def __init__(self, on_servers: dict[str, int], **shapes: tuple[int, ...]):
        rng = np.random.default_rng(5)
        self.on_servers = on_servers
        self.weights = {name: tf.Variable(rng.uniform(0.5, 1.5, shape), name=name) for name, shape in shapes.items()}

    def step(self, x: Any) -> Any:
        """A step over all variables, of which losses are returned."""
        raise NotImplementedError

    def train(self, name: str, x: Any, *others: Any) -> tf.Tensor:
        """A step of descent, for one of the weights."""
        with tf.GradientTape() as tape:
            value = x * self.weights[name]
            for other in others:
                value = value * other
            loss = tf.reduce_mean(tf.square(value - 1.0))
        self.weights[name].assign_sub(0.05 * tape.gradient(loss, self.weights[name]))
        return loss


class BesideLookups(CrossedStep):
    """`c` is trained through `e`, and that through `a`; `f` through `w`, whose gradient waits for two lookups.

    The gradients of `c` and `w` are sent together, those of `e` and `f` are of one level.
    """

    def __init__(self) -> None:
        names = {name: (2,) for name in ("a", "e", "c", "w", "f")} | {"one": (5, 2), "other": (5, 2)}
        super().__init__(dict.fromkeys(("c", "w", "one", "other"), 0), **names)

    def step(self, x: Any) -> Any:
        ids = tf.cast(x[:, 0] * 3.0, tf.int64) % 5
        tables, w = (self.weights["one"], self.weights["other"]), self.weights["w"]
        losses = [self.train("a", x), self.train("e", x, self.weights["a"]), self.train("c", x, self.weights["e"])]
        with tf.GradientTape() as tape:
            rows = tf.gather(tables[0], ids)
            again = tf.gather(tables[1], tf.cast(tf.abs(rows[:, 0]) * 3.0, tf.int64) % 5)
            losses.append(tf.reduce_mean(tf.square(again * w + rows - 1.0)))
        for one, gradient in zip((*tables, w), tape.gradient(losses[-1], [*tables, w]), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                one.scatter_sub(tf.IndexedSlices(0.05 * gradient.values, gradient.indices))
            else:
                one.assign_sub(0.05 * gradient)
        losses.append(self.train("f", x, w))
        return losses


class ReadsCount(CrossedStep):
    """A server counts steps, and needs a value that is made of their number by workers."""

    def __init__(self) -> None:
        super().__init__({"p": 0}, a=(2,), p=(2,))
        self.count = tf.Variable(tf.zeros([], tf.float64), trainable=False, name="count")

    def step(self, x: Any) -> Any:
        a, p = self.weights["a"], self.weights["p"]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x * a * p - 1.0))
        of_a, of_p = tape.gradient(loss, [a, p])
        self.count.assign_add(1.0)
        a.assign_sub(0.05 * of_a)
        p.assign_sub(0.05 * of_p * (tf.norm(of_a) * self.count) / self.count)
        return loss


class Averages(CrossedStep):
    """An average of what `b` gives is needed to train `b2`, and that for `a2`; another one is of what `a` gives.

    The gradients of `a` and `a2` are sent together, the averages are of one level.
    """

    def __init__(self) -> None:
        super().__init__({"a": 0, "a2": 0, "b": 1, "b2": 1}, a=(2,), a2=(2,), b=(2,), b2=(2,))
        self.averages = {
            name: tf.Variable(tf.ones([], tf.float64), trainable=False, name=f"average_{name}") for name in "ab"
        }

    def step(self, x: Any) -> Any:
        losses = [self.train(name, x) for name in "ab"]
        for name, average in self.averages.items():
            average.assign(0.5 * average + 0.5 * tf.reduce_mean(x * self.weights[name]))
        losses.append(self.train("b2", x, self.averages["b"]))
        losses.append(self.train("a2", x, self.weights["b2"]))
        return losses


class EarlyResult(BesideLookups):
    """A result of `w` could travel with the gradients of `e` and `e2`, for which the message with `w` waits."""

    def __init__(self) -> None:
        super().__init__()
        self.weights["e2"] = tf.Variable(np.ones(2), name="e2")

    def step(self, x: Any) -> Any:
        losses = super().step(x)
        losses.append(self.train("e2", x, self.weights["a"]))
        return [*losses, tf.reduce_mean(x * self.weights["w"])]


CROSSED: dict[str, Callable[[], CrossedStep]] = {
    "buckets": BesideLookups,
    "messages": ReadsCount,
    "statistics": Averages,
    "results": EarlyResult,
}


@dataclass(frozen=True, slots=True)
class Crossed:
    """Some variables live on servers, by name and rank; AllReduce for the others."""

    on_servers: Mapping[str, int]

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """The variables' strategies."""
        nodes = []
        for variable in item.trainable_variables:
            rank = self.on_servers.get(variable.name)
            server = None if rank is None else resources.workers[rank % len(resources.workers)]
            nodes.append(
                VariableStrategy(
                    variable.name,
                    AllReduceSynchronizer() if server is None else PSSynchronizer(f"{server.address}:CPU:0"),
                )
            )
        return Strategy(tuple(nodes), tuple(device for node in resources.workers for device in node.replica_devices))


def compiled(name: str, *, worker: int = 0, replicas: Sequence[int] = (1, 1)) -> CompiledProgram:
    """The program of a crossed step on one of two workers, which hold so many replicas each."""
    step = CROSSED[name]()
    item = capture_steps.capture(step.step, tf.ones([4, 2], tf.float64)).item
    devices = ("127.0.0.1:CPU:0", "127.0.0.2:CPU:0")
    nodes = tuple(
        VariableStrategy(
            one.name,
            PSSynchronizer(devices[step.on_servers[one.name]])
            if one.name in step.on_servers
            else AllReduceSynchronizer(),
        )
        for one in item.trainable_variables
    )
    where = kernel_programs.topology(*replicas, worker=worker)
    where = replace(where, servers={device: rank for rank, device in enumerate(devices)})
    return compile(item, Strategy(nodes, devices), where, Options(channel="c"))
