"""The door of replica functions: traced once, they say themselves what is combined over replicas, and when.

What a function combines it *marks*: an `Identity` of its own passes on what is combined. Nothing else is: gradients,
metrics and results are each replica's own, as in `tf.distribute`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.capture.alike import without_repeats
from autodist_py.capture.assemble import assemble_marked, mapped_variables, table_initializers
from autodist_py.capture.branches import drop_unused_arguments
from autodist_py.capture.doors.before_branches import BeforeBranches
from autodist_py.capture.doors.bound_graph import BoundGraph, VariableUses, bound_graph, op_name
from autodist_py.capture.doors.done_for_all import DoneForAll
from autodist_py.capture.recording.gradients import Origin
from autodist_py.capture.shapes import static_shape
from autodist_py.capture.traced import TracedGraph
from autodist_py.kernel.ir.dataflow import analyse, varying_writes
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Output, Statistic


@dataclass(frozen=True, slots=True)
class CapturedReplicaFunction:
    """A replica function, captured.

    Attributes:
        item: the program of one replica.
        variables: the variables that it uses, those of the first replica, by their names in the item.
        state: tensors it closes over, which are the same on all replicas of this process, by input name.
        parts: the names of the inputs of which each replica is fed its own, in the order in which they were made.
        results: for each of the function's results, in order, which of the item's outputs it is.
    """

    item: GraphItem
    variables: Mapping[str, tf.Variable]
    state: Mapping[str, tf.Tensor]
    parts: tuple[str, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Marker:
    """What is combined: a tensor, or indices, values and dense shape, as ops of their own pass it on."""

    tensors: tuple[tf.Tensor, ...]
    reduction: str

    def is_gradient_of(self, variable: Any) -> bool:
        """Whether it has the type and shape of a gradient of `variable`, which is trained."""
        if not (variable.trainable and variable.dtype.is_floating):
            return False
        values, rank = self.tensors[len(self.tensors) // 2], variable.shape.rank
        is_like = values.shape.rank == rank and values.dtype == variable.dtype.base_dtype
        if len(self.tensors) == 3:
            return bool(is_like and rank and values.shape[1:].as_list() == variable.shape[1:].as_list())
        return self.reduction == "add" and is_like and values.shape.as_list() == variable.shape.as_list()


@dataclass(frozen=True, slots=True)
class Replicas:
    """What a trace asks of the replicas that it stands for.

    Attributes:
        container_of: the variable that a replica's variable is a component of, or itself.
        is_local: whether each replica has its own value of the variable with these components.
        is_alone: whether all replicas are of this process.
        folds_seeds: whether replicas draw other numbers, each its own, by one seed.
        is_separate: whether each replica has its own value of this one, which they had together.
        stays_one: whether replicas have this one together, and make one value of those that they write.
        separate: makes each replica have its own value of a variable, given with its name in the item and what writes
            another one on each; or refuses it.
    """

    container_of: Callable[[Any], Any]
    is_local: Callable[[Any], bool]
    is_alone: bool = True
    folds_seeds: bool = False
    is_separate: Callable[[Any], bool] = lambda container: False
    stays_one: Callable[[Any], bool] = lambda container: False
    separate: Callable[[Any, str, str], None] = lambda container, name, writer: None


class ReplicaTrace:
    """One trace of a replica function, of that `name`: its graph, its parts, and what it marks."""

    def __init__(self, name: str, replicas: Replicas):
        self.graph = tf_adapter.StepGraph(op_name(name))
        self.branches = BeforeBranches(self.graph)
        """In which something is combined."""
        self._replicas = replicas
        self._uses = VariableUses(replicas.container_of)
        self._parts: list[tf.Tensor] = []
        self._markers: list[_Marker] = []
        self._updated: dict[int, list[Any]] = {}
        """By the position of a marker, the variables that are updated by it, in order."""
        self._marker_of: dict[int, int] = {}
        self._shared: dict[int, tf.Tensor] = {}
        self._shared_here: dict[int, tf.Tensor] = {}
        self.together = DoneForAll(replicas.container_of, folds_seeds=replicas.folds_seeds)
        self._results: list[tf.Tensor] = []

    def part(self, spec: tf.TensorSpec, name: str) -> tf.Tensor:
        """A tensor of which each replica is fed its own."""
        with self.graph.as_default():
            placeholder = tf.compat.v1.placeholder(spec.dtype, spec.shape, name=op_name(name))
        self._parts.append(placeholder)
        return placeholder

    def has(self, value: Any) -> bool:
        """Whether `value` is a tensor of the function, or of a branch of it, of which each replica may have another."""
        return isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value) and self.branches.are_around(value)

    def is_one_for_all(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is computed from constants, and variables that this process's replicas have together."""
        return all(map(self._is_one_for_all, self._ancestors(tensor)))

    def _is_one_for_all(self, op: tf.Operation) -> bool:
        """Whether `op` gives all replicas of this process the same, if it is given that."""
        if op.type != "Placeholder":
            return op.type == "ReadVariableOp" or not op.op_def.is_stateful
        given = (outer for outer, inner in op.graph.captures if inner.op is op)
        return any(self._replicas.stays_one(self._replicas.container_of(one)) for one in given)

    def _ancestors(self, tensor: tf.Tensor) -> Iterator[tf.Operation]:
        """The ops that `tensor` is computed by, back to what replicas have combined."""
        combined = {one.op for marker in self._markers for one in marker.tensors}
        seen, waiting = set[tf.Operation](), [self.branches.outside(tensor).op]
        while waiting:
            op = waiting.pop()
            if op not in seen:
                seen.add(op)
                yield op
                waiting += [self.branches.outside(read).op for read in (() if op in combined else op.inputs)]

    def added(self, value: Any) -> Any:
        """The sum of the replicas' values of a tensor; of IndexedSlices the slices, one after the other."""
        if not isinstance(value, tf.IndexedSlices):
            return self._marked("add", value)[0]
        values, indices, shape = value.values, value.indices, value.dense_shape
        shape = tf.constant([-1] * values.shape.rank, tf.int64) if shape is None else shape
        marked = self._marked("rows", indices, values, shape)
        return tf.IndexedSlices(marked[1], marked[0], None if value.dense_shape is None else marked[2])

    def rows(self, value: tf.Tensor) -> tf.Tensor:
        """The rows of the replicas' values, one after the other; all but their number is static."""
        return self._marked("rows", value)[0]

    def _on_all(self, predicate: tf.Tensor) -> tf.Tensor:
        """Whether `predicate` is true on all replicas."""
        return tf.equal(self.added(tf.cast(tf.logical_not(tf.cast(predicate, tf.bool)), tf.int32)), 0)

    def _marked(self, reduction: str, *tensors: tf.Tensor) -> list[tf.Tensor]:
        tensors = tuple(self.branches.values(tensors))
        with self.graph.as_default(), tf.name_scope("combined"), tf.control_dependencies(None):
            joined = tensors[:2] if reduction == "rows" else ()
            marked = [tf.identity(_any_rows(tensor)) for tensor in joined]
            marked += [tf.identity(tensor) for tensor in tensors[len(joined) :]]
        self._marker_of[id(marked[len(marked) // 2])] = len(self._markers)
        self._markers.append(_Marker(tuple(marked), reduction))
        return marked

    def is_update(self, variable: Any, value: Any) -> None:
        """`variable` is updated by `value`: if that is computed from one thing marked, it may be its gradient.

        `value` is followed back through what has the shape of one thing that it reads: a product with a factor has.
        """
        tensor = value.values if isinstance(value, tf.IndexedSlices) else value
        while self.has(tensor):
            tensor = self.branches.outside(tensor)
            if id(tensor) in self._marker_of:
                break
            reads = [tensor.op.inputs[tensor.value_index]] if tensor.op.type == "IdentityN" else tensor.op.inputs
            alike = [each for each in reads if _is_like(each, tensor)]
            tensor = alike[0] if len(alike) == 1 else None
        if id(tensor) in self._marker_of:
            self._updated.setdefault(self._marker_of[id(tensor)], []).append(variable)

    def share(self, tensor: tf.Tensor) -> None:
        """`tensor` is the same on all replicas, as the result of one thing that they did together."""
        self._shared[id(tensor)] = tensor

    def share_here(self, tensor: tf.Tensor) -> None:
        """`tensor` is the same on all replicas of this process, and may be another in another process."""
        self._shared_here[id(tensor)] = tensor

    def require_received(self, tensor: tf.Tensor, *, given: tf.Tensor | None = None) -> None:
        """Refuse that the result of one thing that replicas did together is of what they did not combine.

        Args:
            tensor: the result.
            given: a part of which the replicas that did so are fed the same.

        Raises:
            CaptureError: it is computed from another part, by more than what replicas have combined.
        """
        own = {part.op for part in self._parts if part is not given}
        if any(op in own for op in self._ancestors(tensor)):
            raise _not_received(tensor)

    def is_one_here(self, tensor: tf.Tensor) -> bool:
        """Whether the replicas of this process are known to have the same, not only an equal one."""
        return id(tensor) in self._shared or id(tensor) in self._shared_here

    def is_shared(self, tensor: tf.Tensor) -> bool:
        """Whether it was said to be the same on all replicas."""
        return id(tensor) in self._shared

    @contextmanager
    def tracing(self, make_outside: Callable[..., Any]) -> Iterator[None]:
        """Trace in this context; variables that are made in it `make_outside(creator, **arguments)` makes."""
        with ExitStack() as stack:
            stack.enter_context(self._uses.active())
            stack.enter_context(self.branches.decided(self._on_all))
            stack.enter_context(tf_adapter.inlined_functions(self.graph))
            stack.enter_context(self.graph.as_default())
            stack.enter_context(tf.variable_creator_scope(make_outside))
            yield

    def run(self, function: Callable[[], Sequence[tf.Tensor]]) -> None:
        """Trace `function`, which returns those of its results that are tensors."""

        def noted() -> list[tf.Tensor]:
            self._results = list(function())
            return self._results

        tf_adapter.trace(noted, self.graph, (), {}, autograph=False)

    def captured(self) -> CapturedReplicaFunction:
        """What was traced, as a program.

        Raises:
            CaptureError: a variable of which there is one for all replicas is written.
        """
        bound = bound_graph(self.graph, self._uses)
        drop_unused_arguments(bound.definition)
        outputs: dict[str, Output] = {}
        results = []
        for tensor, given in zip(self.graph.outputs, self._results, strict=True):
            name, own = tensor.name, not self.is_shared(given)
            outputs.setdefault(name, Output(name, tensor.dtype.name, static_shape(tensor.shape), per_replica=own))
            results.append(list(outputs).index(name))
        gradients = tuple(self._gradients(bound))
        traced = TracedGraph(
            graph=bound.definition,
            variables=tuple(
                replace(one, per_replica=self._is_own(bound.variables[one.name]))
                for one in mapped_variables(bound.variables)
            ),
            gradients=gradients,
            inputs=(
                *(_input(part.op.name, part, "part") for part in self._parts),
                *(_input(name, tensor, "state") for name, tensor in bound.state.items()),
            ),
            outputs=tuple(outputs.values()),
            run_ops=bound.run_ops,
            origins=dict.fromkeys(gradients, Origin()),
            tensor_of=bound.tensor,
            table_initializers=table_initializers(self.graph),
        )
        item = assemble_marked(traced, self._statistics(gradients))
        for variable in item.variables:
            if variable.update_ops:
                self._require_component(variable.name, bound.variables[variable.name])
        item = self._with_own_variables(item, bound)
        self._require_shared(item, bound)
        kept = {variable.name for variable in item.variables}
        return CapturedReplicaFunction(
            item=without_repeats(item),
            variables={name: variable for name, variable in bound.variables.items() if name in kept},
            state=bound.state,
            parts=tuple(part.op.name for part in self._parts),
            results=tuple(results),
        )

    def _gradients(self, bound: BoundGraph) -> Iterator[Gradient]:
        run = map(self.graph.get_operation_by_name, bound.run_ops)
        updated = {bound.named[read.op.name] for op in run for read in op.inputs if read.op.name in bound.named}
        names = {id(self._replicas.container_of(bound.variables[name])): name for name in updated}
        for position, updated_by in sorted(self._updated.items()):
            marker = self._markers[position]
            found = (names.get(id(self._replicas.container_of(variable))) for variable in updated_by)
            trained = [name for name in found if name is not None and marker.is_gradient_of(bound.variables[name])]
            if trained:
                name = self._whose(marker, trained, bound)
                yield Gradient(name, tuple(tensor.name for tensor in marker.tensors), "add")

    def _whose(self, marker: _Marker, trained: Sequence[str], bound: BoundGraph) -> str:
        """The first of the variables that the marked value is computed from: no average of it is. Else the first."""
        value = marker.tensors[len(marker.tensors) // 2].op.inputs[0]
        read = {bound.named.get(op.name) for op in self._ancestors(value)}
        return next(filter(read.__contains__, trained), trained[0])

    def _statistics(self, gradients: Sequence[Gradient]) -> Iterator[Statistic]:
        """What is combined beside gradients; a dense shape is the same everywhere."""
        taken = {tensor for gradient in gradients for tensor in gradient.tensors}
        for marker in self._markers:
            for tensor in marker.tensors[:2]:
                if tensor.name not in taken:
                    shape = tuple(tensor.shape.as_list())
                    yield Statistic(tensor.name, tensor.dtype.name, shape, marker.reduction)

    def _require_shared(self, item: GraphItem, bound: BoundGraph) -> None:
        """Refuse that what is done for all replicas depends on what is one's own."""
        for variable in item.variables:
            container = self._replicas.container_of(bound.variables[variable.name])
            is_own = variable.per_replica and (self._replicas.is_alone or self._replicas.is_local(container))
            if is_own and self.together.reads(container):
                raise CaptureError(
                    f"a merge_call reads variable '{variable.name}', of which each replica has its own value. Read it "
                    "before, and reduce it there: merge_call(merge_fn, args=(variable.read_value(),))"
                )
        analysis = analyse(item)
        self.together.require_alike(self.graph, analysis.captured)
        own = analysis.of_examples
        for tensor in self._shared.values():
            if tensor.op.name in own:
                raise _not_received(tensor)

    def _with_own_variables(self, item: GraphItem, bound: BoundGraph) -> GraphItem:
        """`item`, in which a variable that replicas write with what differs between them is each one's own."""
        while written := dict(varying_writes(item, analyse(item))):
            for name, writer in written.items():
                self._replicas.separate(self._replicas.container_of(bound.variables[name]), name, writer)
            variables = (replace(one, per_replica=one.per_replica or one.name in written) for one in item.variables)
            item = replace(item, variables=tuple(variables))
        return item

    def _is_own(self, variable: Any) -> bool:
        container = self._replicas.container_of(variable)
        return self._replicas.is_local(container) or self._replicas.is_separate(container)

    def _require_component(self, name: str, variable: Any) -> None:
        if self._replicas.container_of(variable) is variable:
            raise CaptureError(
                f"variable '{name}' is written by each replica, and was made outside of the strategy's scope, so that "
                "there is one for all. Make it within `with strategy.scope():`"
            )


def _not_received(tensor: tf.Tensor) -> CaptureError:
    return CaptureError(
        f"a merge_call returns '{tensor.name}', which is computed from a value that each replica has for itself, and "
        "that it does not receive. Give it the value: merge_call(merge_fn, args=(value,))"
    )


def _input(name: str, tensor: tf.Tensor, kind: str) -> Input:
    return Input(name, tensor.dtype.name, static_shape(tensor.shape), batched=False, kind=kind)


def _is_like(read: tf.Tensor, made: tf.Tensor) -> bool:
    return read.shape.rank is not None and made.shape.rank is not None and read.shape.as_list() == made.shape.as_list()


def _any_rows(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor`, of which TensorFlow does not know how many rows it has."""
    if tensor.shape[:1].as_list() == [None]:
        return tensor
    return tf.dynamic_partition(tensor, tf.zeros(tensor.shape[:1], tf.int32), 1)[0]
