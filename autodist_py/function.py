"""The step function that `@autodist.function` makes: one program per signature, found by what a call is given."""

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from autodist_py.capture.again import Trace
from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.function import (
    Argument,
    CapturedFunction,
    Slot,
    argument_names,
    capture_function,
    step_signature,
)
from autodist_py.capture.user_code import fixed_size, line_of, made_by
from autodist_py.kept_programs import Bound, KeptPrograms
from autodist_py.proto.errors import AutoDistError, CaptureError
from autodist_py.settings import KEPT_PROGRAMS_VARIABLE

_PLAIN = (type(None), bool, int, float, complex, str, bytes, tf.DType, type, Enum)
"""Types of constants that a signature remembers by their values, at no cost."""


class Program(Protocol):
    """A compiled step: tensors in, a value for each output of the item out.

    `goes_among` is as in `KeptPrograms.add`.
    """

    @property
    def goes_among(self) -> str: ...

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, taken apart.

    Attributes:
        key: equal for calls that one program serves.
        kind: equal for calls that differ in shapes alone.
        tensors: the tensor arguments, in flat order.
        batched: which of them are batched: they share the size of their first dimension.
        structure: `(args, kwargs)` with `Slot(i)` in the place of the i-th tensor.
    """

    key: tuple[Any, ...]
    kind: tuple[Any, ...]
    tensors: list[tf.Tensor]
    batched: tuple[bool, ...]
    structure: Any

    @property
    def examples(self) -> int | None:
        """The size of the batch; None: no argument is batched."""
        return next((t.shape[0] for t, is_batched in zip(self.tensors, self.batched, strict=True) if is_batched), None)

    @property
    def has_other_sizes(self) -> bool:
        """Whether an array argument is not batched: its first dimension has another size than the first one's."""
        return any(t.shape.rank and not b for t, b in zip(self.tensors, self.batched, strict=True))


@dataclass(frozen=True, slots=True)
class _Made:
    """A program, what it was made of, and the structure of its call, which keeps alive what the key knows by its id."""

    program: Program
    captured: CapturedFunction
    structure: Any


class DistributedFunction:
    """A step function, compiled for the cluster; called like the function it was made from.

    Array arguments (tensors and numpy arrays) may change from call to call; the first dimension of the batched ones may
    change in size. Every other argument is a constant of the program, as in tf.function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        compile_program: Callable[[str, CapturedFunction], Program],
        *,
        name: str,
        options: CaptureOptions,
        batched: Collection[str] | None,
        own: Collection[str] = (),
        kept: Bound | None = None,
    ):
        """Distribute `function`.

        Args:
            function: a step of one device.
            compile_program: makes a program, of a name and what was captured.
            name: of the step's programs.
            options: what the user said about the batch.
            batched: see `AutoDist.function`.
            own: names of the arguments that each worker has of its own, though the batch is the same for all.
            kept: how many programs are kept; None: all.
        """
        self.python_function = function
        self.__doc__ = getattr(function, "__doc__", None)
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__wrapped__ = function
        self._name = name
        self._compile = compile_program
        self._options = options
        self._batched = None if batched is None else frozenset(batched)
        self._own = frozenset(own)
        self._signature = step_signature(function)
        self._bound: list[DistributedFunction] = []
        self._kept = Bound(sys.maxsize, lambda said: None) if kept is None else kept
        self._programs = KeptPrograms[tuple[Any, ...], _Made](f"'{self.__name__}'", self._kept, self._remember)
        self._num_made = 0
        self._let_go: dict[tuple[Any, ...], Trace] = {}
        """What is remembered of those that were let go."""
        self._batched_before: dict[tuple[Any, ...], tuple[bool, ...]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step on the global batch; returns what one device would have returned.

        Raises:
            CaptureError: the step cannot be captured, or the arguments' batch dimensions differ.
            WorkerFailedError: another worker failed; the message names it.
        """
        if not tf.executing_eagerly():
            raise CaptureError(
                f"'{self.__name__}' is a distributed step, which is captured by itself, and was called {self._where()}"
            )
        call = self._take_apart(*self._in_order(args, kwargs))
        made = self._programs.use(call.key)
        if made is not None:
            try:
                return made.captured.result.pack(made.program.run(call.tensors))
            except tf.errors.InvalidArgumentError as error:
                self._explain(call, error, made.captured.graph)
                raise
        traced: tf.Graph | None = None
        try:
            captured = self._captured_as_before(call)
            traced = captured.graph
            made = _Made(self._compile(f"{self._name}/{self._num_made}", captured), captured, call.structure)
            values = made.program.run(call.tensors)
        except AutoDistError:
            raise
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            if self._batched is None and call.has_other_sizes:
                raise CaptureError(self._sizes_message(call, error)) from error
            self._explain(call, error, traced)
            raise
        # Remembered only now: arguments that cannot be run together must not decide what the batch is.
        self._num_made += 1
        self._programs.add(call.key, made, made.program.goes_among)
        self._batched_before.setdefault(call.kind, call.batched)
        return captured.result.pack(values)

    def _explain(self, call: Call, error: Exception, graph: tf.Graph | None) -> None:
        """Let a failure on a replica's rows say at which of the user's lines, and what may have made it."""
        found = re.search(r"\{\{node AutoDist-Replica-\d+/([^}]+)\}\}", str(error))
        op = None if found is None or graph is None else made_by(graph, found[1])
        if op is None or call.examples is None:
            return
        error.add_note(f"'{op.name}' ({op.type}) was made in {line_of(op)}")
        fixed = fixed_size(op, call.examples)
        names = [name for _, name in self._slot_names(call.structure)]
        arguments = zip(names, call.tensors, call.batched, strict=True)
        shared = ", ".join(f"{name} {tensor.shape}" for name, tensor, is_batched in arguments if is_batched)
        if fixed is not None:
            error.add_note(
                f"'{fixed.name}', made in {line_of(fixed)}, has {call.examples} rows whatever the batch, as the whole "
                "batch has; a replica is given its part of it. Write tf.shape(x)[0], or -1 in a reshape, for the "
                "number of examples"
            )
        elif self._batched is None and sum(call.batched) > 1:
            error.add_note(
                f"each replica is given its part of {shared}, as all have the first one's number of rows. If one of "
                "them is no batch, such as weights of classes, name those that are: autodist.function(batched=[...])"
            )

    def _where(self) -> str:
        """Where it was called from, if not from plain Python, and the way out."""
        graph = tf.compat.v1.get_default_graph()
        if graph.building_function:
            return f"while the function '{graph.name}' is traced; call it from plain Python"
        return (
            "where a tf.Graph is built. Leave `tf.Graph().as_default()` (or what disables eager execution) out: "
            "variables are then made eagerly, and scope() is for Keras alone. Or leave @autodist.function out: build "
            "the step in the graph, and run it in autodist.create_distributed_session()"
        )

    def _sizes_message(self, call: Call, error: Exception) -> str:
        names = [name for _, name in self._slot_names(call.structure)]
        described = ", ".join(f"{name} {tensor.shape}" for name, tensor in zip(names, call.tensors, strict=True))
        return (
            f"'{self.__name__}' failed for arguments with different first dimensions, {described}. Those of one size "
            "with the first were shared out as the batch, others given to every replica whole; batched arguments must "
            "have the same number of examples. If they are no batch, name those that are: "
            f"autodist.function(batched=[...]). The failure: {str(error).splitlines()[0]}"
        )

    def _in_order(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments in the order in which the function declares them, by position where that is possible."""
        if not kwargs:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        return bound.args, bound.kwargs

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A step may be a method."""
        if instance is None:
            return self
        bound = self.python_function.__get__(instance, owner)
        name = f"_distributed_{self.__name__}_{id(self)}"
        if name not in vars(instance):
            step = DistributedFunction(
                bound,
                self._compile,
                name=f"{self._name}-{len(self._bound)}",
                options=self._options,
                batched=self._batched,
                kept=self._kept,
            )
            self._bound.append(step)
            object.__setattr__(instance, name, step)
        return vars(instance)[name]

    def captured(self, *args: Any, **kwargs: Any) -> CapturedFunction:
        """The step as it is captured for these arguments; nothing is compiled or run."""
        return self._capture(self._take_apart(*self._in_order(args, kwargs)))

    def clear(self) -> None:
        """Let go of all programs, also of those of the methods that were made from this."""
        self._programs.clear()
        self._let_go.clear()
        self._batched_before.clear()
        for step in self._bound:
            step.clear()

    def _remember(self, key: tuple[Any, ...], made: _Made) -> None:
        """The program of that signature is let go."""
        self._let_go[key] = Trace.of(made.captured)

    def _captured_as_before(self, call: Call) -> CapturedFunction:
        """The step as it is captured now, which is as it was when its program was let go, if one was.

        Raises:
            CaptureError: it is another; on one device it would still be what it was.
        """
        captured = self._capture(call)
        before = self._let_go.get(call.key)
        other = "" if before is None else before.other_than(captured)
        if other:
            raise CaptureError(
                f"'{self.__name__}' was traced again, as the program of this signature was let go, and {other} is "
                "another than before. Do not let a step depend on Python values that change, but on arguments or "
                f"variables; or set {KEPT_PROGRAMS_VARIABLE}, now {self._kept.most}, to as many signatures as there are"
            )
        return captured

    def _capture(self, call: Call) -> CapturedFunction:
        arguments = [
            Argument(
                name, tf.TensorSpec([None, *tensor.shape[1:]] if is_batched else tensor.shape, tensor.dtype), is_batched
            )
            for (_, name), tensor, is_batched in zip(
                self._slot_names(call.structure), call.tensors, call.batched, strict=True
            )
        ]
        captured = capture_function(self.python_function, arguments, call.structure, self._options)
        fed = (source.name for source in captured.item.inputs if source.kind == "feed")
        named = zip(self._slot_names(call.structure), fed, strict=True)
        own = frozenset(fed_as for (parameter, _), fed_as in named if parameter in self._own)
        return replace(captured, examples=call.examples, own=own, is_plain=_is_plain(call.structure))

    def _slot_names(self, structure: Any) -> list[tuple[str, str]]:
        """For each tensor argument its parameter, and its own name."""
        args, kwargs = structure
        names = argument_names(self._signature, args, kwargs)
        leaves = tf.nest.flatten(structure)
        return [name for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Slot)]

    def _take_apart(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        tensors: list[tf.Tensor] = []
        constants: list[Any] = []

        def leaf(value: Any) -> Any:
            if isinstance(value, np.ndarray | np.generic):
                value = tf.convert_to_tensor(value)
            elif isinstance(value, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices):
                raise CaptureError(
                    f"'{self.__name__}' was given a {type(value).__name__}, which cannot be shared out by rows; pass "
                    "its components as dense tensors, or make it inside the step"
                )
            if isinstance(value, tf.Tensor) and value.dtype not in (tf.resource, tf.variant):
                tensors.append(value)
                constants.append(None)
                return Slot(len(tensors) - 1)
            constants.append(_constant_key(value))
            return value

        structure = tf.nest.map_structure(leaf, (tuple(args), dict(kwargs)))
        shapes = [tensor.shape for tensor in tensors]
        kind = (
            _structure_key(structure),
            tuple(constants),
            tuple((t.dtype, s.rank) for t, s in zip(tensors, shapes, strict=True)),
        )
        batched = self._which_batched(structure, shapes, kind)
        key = (kind, tuple(tuple(s[1:]) if b else tuple(s) for s, b in zip(shapes, batched, strict=True)), batched)
        return Call(key, kind, tensors, batched, structure)

    def _which_batched(self, structure: Any, shapes: Sequence[tf.TensorShape], kind: Any) -> tuple[bool, ...]:
        """Which tensors carry the batch: as the user says, else those that share the first one's leading size.

        Raises:
            CaptureError: an argument that is, or was in an earlier call, batched has another size than the first; or
                the user names as batched what is no array argument.
        """
        sizes = [shape[0] if shape.rank else None for shape in shapes]
        if self._batched is not None:
            wanted = self._named_batched(structure, sizes)
        elif kind in self._batched_before:
            wanted = self._batched_before[kind]
        else:
            first = next((size for size in sizes if size is not None), None)
            wanted = tuple(size is not None and size == first for size in sizes)
        differing = {size for size, is_batched in zip(sizes, wanted, strict=True) if is_batched}
        if len(differing) > 1:
            described = ", ".join(str(shape) for shape, is_batched in zip(shapes, wanted, strict=True) if is_batched)
            advice = (
                ""
                if self._batched is not None
                else (". If one of them is no batch, name those that are: autodist.function(batched=[...])")
            )
            raise CaptureError(
                f"the batched arguments of '{self.__name__}' must have the same number of examples (first dimension); "
                f"received shapes {described}{advice}"
            )
        return wanted

    def _named_batched(self, structure: Any, sizes: Sequence[int | None]) -> tuple[bool, ...]:
        parameters = [parameter for parameter, _ in self._slot_names(structure)]
        arrays = {parameter for parameter, size in zip(parameters, sizes, strict=True) if size is not None}
        unknown = sorted((self._batched or frozenset()) - arrays)
        if unknown:
            raise CaptureError(
                f"batched=[...] names array arguments of '{self.__name__}'; received {', '.join(unknown)}, and its "
                f"array arguments are {', '.join(dict.fromkeys(parameters)) or 'none'}"
            )
        return tuple(parameter in (self._batched or ()) for parameter in parameters)


def _is_plain(structure: Any) -> bool:
    """Whether all that is no tensor in it is known by its value, for ever, and takes no memory to speak of."""
    return all(isinstance(leaf, (Slot, *_PLAIN)) for leaf in tf.nest.flatten(structure))


def _constant_key(value: Any) -> Any:
    if isinstance(value, float | complex):
        return (type(value), repr(value))  # 0.0 == -0.0, and a NaN is not equal to itself
    try:
        hash(value)
    except TypeError:
        return (type(value), id(value))
    return (type(value), value)


def _structure_key(structure: Any) -> Any:
    if isinstance(structure, Mapping):
        return (type(structure), tuple((key, _structure_key(structure[key])) for key in sorted(structure)))
    if isinstance(structure, list | tuple):
        return (type(structure), tuple(map(_structure_key, structure)))
    return type(structure)
