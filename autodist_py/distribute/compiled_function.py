"""A replica function that is traced once, compiled for all replicas of a strategy, and called as one op."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.capture.doors.bound_graph import NewVariables
from autodist_py.capture.doors.replica_function import Replicas, ReplicaTrace
from autodist_py.distribute import tf_adapter
from autodist_py.distribute.placement import Placement
from autodist_py.distribute.replica_context import TracedReplicaContext
from autodist_py.kernel.ir.names import on_replica
from autodist_py.kernel.pipeline import CompiledProgram
from autodist_py.program.build import CapturedStep
from autodist_py.proto.errors import CaptureError


def call_once(strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Trace `function` once for all replicas of `strategy`, and run it on each, in the default graph.

    Returns:
        What it returns, regrouped: tensors as PerReplica, but for those that a `merge_call` has returned.

    Raises:
        CaptureError: a variable is used or made in a way that replicas cannot.
    """
    return _Traced(strategy, function, args, kwargs).called()


class _Traced:
    """A replica function, traced: what each replica is fed, and what is returned."""

    def __init__(self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self._strategy = strategy
        self._name = getattr(function, "__name__", type(function).__name__)
        self._placement: Placement = strategy.extended.placement
        replicas = Replicas(
            tf_adapter.container_of,
            tf_adapter.is_sync_on_read,
            is_alone=self._placement.is_alone,
            folds_seeds=self._placement.options.folds_seeds,
            is_separate=tf_adapter.is_separate,
            stays_one=tf_adapter.stays_one,
            separate=self._placement.separate,
        )
        self._trace = ReplicaTrace(self._name, replicas)
        self._context = TracedReplicaContext(strategy, self._trace)
        self._local = range(self._context.num_local)
        self._fed: list[Sequence[Any]] = self._context.fed
        """For each part, in order, what each replica is fed."""
        given = self._entered((tuple(args), dict(kwargs)))
        # A tf.function around it that sees variables made traces it again, and refuses those made then.
        new = NewVariables(are_allowed=True, make=self._variable)
        self._result: Any = None

        def body() -> list[tf.Tensor]:
            with self._context.active():
                self._result = tf.nest.map_structure(self._returned, function(*given[0], **given[1]))
            return [leaf for leaf in self._leaves() if self._trace.has(leaf)]

        with self._trace.tracing(new.create):
            self._trace.run(body)

    def _entered(self, arguments: Any) -> Any:
        """What the function is given for its arguments: parts, where replicas have values of their own."""
        leaves = [_one_for_all(leaf) for leaf in tf.nest.flatten(arguments)]
        owned = [self._own_values(leaf) for leaf in leaves]
        columns = [column for values in owned for column in zip(*map(_tensors, values), strict=True)]
        shapes = iter(self._placement.agreed_shapes([_common_shape(column) for column in columns]))

        def part(*values: Any) -> tf.Tensor:
            self._fed.append(values)
            return self._trace.part(tf.TensorSpec(next(shapes), values[0].dtype), "part")

        entered = [
            tf.nest.map_structure(part, *values, expand_composites=True) if values else leaf
            for leaf, values in zip(leaves, owned, strict=True)
        ]
        return tf.nest.pack_sequence_as(arguments, entered)

    def _own_values(self, leaf: Any) -> Sequence[Any]:
        """What each replica is given for an argument; nothing, where it is one for all."""
        if isinstance(leaf, tf_adapter.DistributedVariable):
            return ()
        if not isinstance(leaf, tf_adapter.DistributedValues):
            # Another worker may have another value.
            is_one = self._placement.is_alone or not tf_adapter.is_of_tensors(leaf)
            return () if is_one else [leaf] * len(self._local)
        values: Sequence[Any] = leaf.values
        if all(isinstance(value, np.ndarray) for value in values):  # Numbers: Python computes with them otherwise.
            values = [tf.convert_to_tensor(value) for value in values]
        are_tensors = all(map(tf.is_tensor, _tensors(values)))
        if not are_tensors or len({tuple(each.dtype for each in _tensors(value)) for value in values}) > 1:
            raise CaptureError(
                f"each replica is given an object of its own, {leaf.values}; a function that is compiled for all of "
                "them takes tensors of one type. Give it tf.constant(...) of the values, or call run() on no "
                "tf.function"
            )
        return values

    def _variable(self, creator: Callable[..., Any], **kwargs: Any) -> Any:
        with tf_adapter.cross_replica_context(self._strategy):
            return creator(**kwargs)  # The strategy's, as run() is called in its scope.

    def _returned(self, leaf: Any) -> Any:
        """A result of the function, as what replicas return together is made of."""
        if isinstance(leaf, tf_adapter.DistributedVariable):
            return leaf
        if isinstance(leaf, tf.Variable) and not tf_adapter.is_lazy_read(leaf):
            return tf_adapter.container_of(leaf)
        return tf.convert_to_tensor(leaf) if tf_adapter.is_lazy_read(leaf) else leaf

    def _leaves(self) -> list[Any]:
        return tf.nest.flatten(self._result, expand_composites=True)

    def called(self) -> Any:
        """The results of an op of the default graph that runs it on all replicas."""
        captured = self._trace.captured()
        components = {name: self._first_of(name, one) for name, one in captured.variables.items()}
        step = CapturedStep(item=captured.item, variables=components, state=captured.state, name=self._name)
        compiled = self._placement.compiled(step)
        program = compiled.program
        fed = {
            on_replica(position, part): value
            for part, values in zip(captured.parts, self._fed, strict=True)
            for position, value in enumerate(values)
        }
        variables = dict(self._bound(program, compiled.variables))
        ran = compiled.add_to_graph(variables, [fed[name] for name, _ in program.feeds])
        tf_adapter.on_gradient(ran, self._refuse_gradient)
        fetched = list(self._fetched(program, ran.outputs))
        results = iter(captured.results)
        values: list[list[Any]] = []
        for leaf in self._leaves():
            if self._trace.has(leaf):
                own = fetched[next(results)]
                values.append(own[:1] * len(own) if self._trace.is_one_here(leaf) else own)
            else:
                values.append([ran if isinstance(leaf, tf.Operation) else leaf] * len(self._local))
        return tf_adapter.regroup(
            tuple(
                tf.nest.pack_sequence_as(self._result, [value[position] for value in values], expand_composites=True)
                for position in self._local
            )
        )

    def _refuse_gradient(self, *_: Any) -> Any:
        raise CaptureError(
            f"a gradient is computed through run({self._name}), whose replicas are one compiled program. Compute it in "
            f"'{self._name}': with the tape, and what it watches, in the function that is given to run()"
        )

    def _first_of(self, name: str, variable: tf.Variable) -> tf.Variable:
        """The first component of the variable that `variable` stands for in the function."""
        container = tf_adapter.container_of(variable)
        if not isinstance(container, tf_adapter.DistributedVariable):
            return variable
        first: tf.Variable = tf_adapter.components_of(container)[0]
        if tf_adapter.handle_of(first) is not tf_adapter.handle_of(variable):
            raise CaptureError(
                f"'{name}' is another replica's component of a variable: a replica reads and writes its own. Use the "
                "variable itself, which stands for the replica's component in run()"
            )
        return first

    def _bound(
        self, program: CompiledProgram, variables: Mapping[str, tf.Variable]
    ) -> Iterator[tuple[tuple[str, int], tf.Variable]]:
        """For each variable of the program and replica, the component that is the replica's, or a copy of the first."""
        kept = {one.name for one in program.item.variables if one.per_replica or self._placement.options.keeps_copies}
        for bound in program.variables:
            own = variables[bound.variable]
            if bound.replica and bound.variable not in kept:
                own = self._placement.copies.of(own, bound.replica, bound.device)
            elif bound.replica:
                container = tf_adapter.container_of(own)
                is_one = not isinstance(container, tf_adapter.DistributedVariable)
                own = own if is_one else tf_adapter.components_of(container)[bound.replica]
            yield (bound.variable, bound.replica), own

    def _fetched(self, program: CompiledProgram, tensors: Sequence[tf.Tensor]) -> Iterator[list[tf.Tensor]]:
        """Of each of the item's outputs the value of each replica: one and the same, where it is shared."""
        values: dict[str, list[tf.Tensor]] = {output.tensor: [] for output in program.item.outputs}
        for output, tensor in zip(program.fetched, tensors, strict=True):
            values[output.tensor].append(tensor)
        for output in program.item.outputs:
            own = values[output.tensor]
            yield own if output.per_replica else own * len(self._local)


def _one_for_all(leaf: Any) -> Any:
    """The number or text that a PerReplica has for each replica, if it is the same; else `leaf`."""
    if not isinstance(leaf, tf_adapter.PerReplica) or any(map(tf.is_tensor, leaf.values)):
        return leaf
    first, *others = leaf.values
    is_one = isinstance(first, bool | int | float | str) and all(
        type(other) is type(first) and other == first for other in others
    )
    return first if is_one else leaf


def _tensors(value: Any) -> list[Any]:
    flat: list[Any] = tf.nest.flatten(value, expand_composites=True)
    return flat


def _common_shape(tensors: Sequence[tf.Tensor]) -> tf.TensorShape:
    """What is known of the shapes of all of them."""
    return reduce(tf.TensorShape.most_specific_compatible_shape, (tensor.shape for tensor in tensors))
