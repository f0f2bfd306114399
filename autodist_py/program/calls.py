"""`Calls`: what a step function is called with, taken apart into tensors, what is batched of them, and constants."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import Signature
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from autodist_py.capture.doors.function import Argument, Slot, argument_names
from autodist_py.proto.errors import CaptureError

_Batches: TypeAlias = tuple[int | None, ...]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, tf.DType, type, Enum)
"""Types of constants that a signature remembers by their values, at no cost."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, taken apart.

    Attributes:
        key: equal for calls that one program serves.
        kind: equal for calls that differ in shapes alone.
        tensors: the tensor arguments, in flat order.
        batches: for each of them the batch that it is of, from 0; those of one batch share the size of their first
            dimension. None: it is not batched.
        structure: `(args, kwargs)` with `Slot(i)` in the place of the i-th tensor.
    """

    key: tuple[Any, ...]
    kind: tuple[Any, ...]
    tensors: list[tf.Tensor]
    batches: tuple[int | None, ...]
    structure: Any

    @property
    def examples(self) -> int | None:
        """The size of the first batch; None: no argument is batched."""
        return next((t.shape[0] for t, batch in zip(self.tensors, self.batches, strict=True) if batch == 0), None)

    @property
    def has_other_sizes(self) -> bool:
        """Whether an array argument is not batched: its first dimension has another size than the first one's."""
        return any(t.shape.rank and batch is None for t, batch in zip(self.tensors, self.batches, strict=True))


class Calls:
    """Takes apart the calls of one step function."""

    def __init__(self, title: str, signature: Signature, batched: Collection[str] | None, *, are_parts: bool = False):
        """No call yet.

        Args:
            title: the function's name.
            signature: its signature.
            batched: see `AutoDist.function`.
            are_parts: whether other workers have parts of their own, whose sizes are not known here.
        """
        self._title, self._are_parts = title, are_parts
        self._signature = signature
        self._batched = None if batched is None else frozenset(batched)
        self._before: dict[tuple[Any, ...], _Batches] = {}
        """What was batched in the last call of a kind that could be run."""

    def take_apart(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """One call.

        Raises:
            CaptureError: an argument cannot be shared out, or what is batched has several sizes.
        """
        args, kwargs = self._in_order(args, kwargs)
        tensors: list[tf.Tensor] = []
        constants: list[Any] = []

        def leaf(value: Any) -> Any:
            if isinstance(value, np.ndarray | np.generic):
                value = tf.convert_to_tensor(value)
            elif isinstance(value, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices):
                raise CaptureError(
                    f"'{self._title}' was given a {type(value).__name__}, which cannot be shared out by rows; pass "
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
        batches = self._batches(structure, shapes, kind)
        known = tuple(tuple(s) if b is None else tuple(s[1:]) for s, b in zip(shapes, batches, strict=True))
        return Call((kind, known, batches), kind, tensors, batches, structure)

    def _batches(self, structure: Any, shapes: Sequence[tf.TensorShape], kind: Any) -> _Batches:
        """Which tensors carry a batch: those that the user names, else those that share the first one's leading size.

        What the user names may be of several batches: of one are those that had the same size in all calls so far, or
        in the first one where workers have parts of their own. A single row beside several is for all of them.

        Raises:
            CaptureError: arguments that were of one batch in an earlier call have several sizes; or the user names as
                batched what is no array argument.
        """
        sizes = [shape[0] if shape.rank else None for shape in shapes]
        before = self._before.get(kind)
        if self._batched is not None:
            are_batched = self._named_batched(structure, sizes)
            if not self._are_parts:
                are_batched = _without_single_rows(are_batched, sizes)
            if before is None or not self._are_parts:
                return _numbered(are_batched, list(zip(before or are_batched, sizes, strict=True)))
        first = next((size for size in sizes if size is not None), None)
        batches = before or tuple(0 if size is not None and size == first else None for size in sizes)
        of_batches = {(batch, size) for size, batch in zip(sizes, batches, strict=True) if batch is not None}
        if len(of_batches) > len({batch for batch, _ in of_batches}):
            described = ", ".join(str(shape) for shape, batch in zip(shapes, batches, strict=True) if batch is not None)
            advice = (
                "If one of them is no batch, or they are of several batches, name those that are batched: "
                "autodist.function(batched=[...])"
                if self._batched is None
                else 'With AutoDist(batch="local") the first call says which are of one batch, on all workers'
            )
            raise CaptureError(
                f"the arguments of '{self._title}' that are of one batch must have the same number of examples (first "
                f"dimension); received shapes {described}. {advice}"
            )
        return batches

    def _named_batched(self, structure: Any, sizes: Sequence[int | None]) -> tuple[bool, ...]:
        parameters = [parameter for parameter, _ in self._names(structure)]
        arrays = {parameter for parameter, size in zip(parameters, sizes, strict=True) if size is not None}
        unknown = sorted((self._batched or frozenset()) - arrays)
        if unknown:
            raise CaptureError(
                f"batched=[...] names array arguments of '{self._title}'; received {', '.join(unknown)}, and its "
                f"array arguments are {', '.join(dict.fromkeys(parameters)) or 'none'}"
            )
        return tuple(parameter in (self._batched or ()) for parameter in parameters)

    def remember(self, call: Call) -> None:
        """The call could be run: in later ones of its kind the same arguments are batched, whatever sizes they have."""
        self._before[call.kind] = call.batches

    def clear(self) -> None:
        """Forget all calls."""
        self._before.clear()

    def arguments(self, call: Call) -> list[Argument]:
        """The tensor arguments as they are captured, a batched one for any number of examples."""
        return [
            Argument(
                name,
                tf.TensorSpec(tensor.shape if batch is None else [None, *tensor.shape[1:]], tensor.dtype),
                batch,
            )
            for (_, name), tensor, batch in zip(self._names(call.structure), call.tensors, call.batches, strict=True)
        ]

    def parameters(self, call: Call) -> list[str]:
        """For each tensor argument the parameter that it is given to, or is in."""
        return [parameter for parameter, _ in self._names(call.structure)]

    def batched_beside(self, call: Call, argument: str) -> list[str]:
        """The parameters of the arguments that are batched, without one argument."""
        slots = zip(self._names(call.structure), call.batches, strict=True)
        named = (parameter for (parameter, name), batch in slots if batch is not None and name != argument)
        return list(dict.fromkeys(named))

    def sharing(self, call: Call) -> str:
        """The arguments that are batched by having the first one's size; "" if no other has, or the user says."""
        if self._batched is not None or sum(batch is not None for batch in call.batches) <= 1:
            return ""
        names = [name for _, name in self._names(call.structure)]
        arguments = zip(names, call.tensors, call.batches, strict=True)
        return ", ".join(f"{name} {tensor.shape}" for name, tensor, batch in arguments if batch is not None)

    def sizes_message(self, call: Call, error: Exception) -> str:
        """Why a call with arrays of other sizes may have failed; "" if its sizes do not tell, or the user has."""
        if self._batched is not None or not call.has_other_sizes:
            return ""
        names = [name for _, name in self._names(call.structure)]
        described = ", ".join(f"{name} {tensor.shape}" for name, tensor in zip(names, call.tensors, strict=True))
        return (
            f"'{self._title}' failed for arguments with different first dimensions, {described}. Those of one size "
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

    def _names(self, structure: Any) -> list[tuple[str, str]]:
        """For each tensor argument its parameter, and its own name."""
        args, kwargs = structure
        names = argument_names(self._signature, args, kwargs)
        leaves = tf.nest.flatten(structure)
        return [name for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Slot)]


def is_plain(structure: Any) -> bool:
    """Whether all that is no tensor in it is known by its value, for ever, and takes no memory to speak of."""
    return all(isinstance(leaf, (Slot, *_PLAIN)) for leaf in tf.nest.flatten(structure))


def _without_single_rows(are_batched: Sequence[bool], sizes: Sequence[int | None]) -> tuple[bool, ...]:
    """What is batched, but for single rows beside batches of several."""
    named = list(zip(are_batched, sizes, strict=True))
    has_several = any(is_batched and size is not None and size > 1 for is_batched, size in named)
    return tuple(is_batched and not (has_several and size == 1) for is_batched, size in named)


def _numbered(are_batched: Sequence[bool], alike: Sequence[Hashable]) -> _Batches:
    """For each that is batched the number of its batch, from 0, in order; those of one batch are `alike`."""
    first = dict.fromkeys(one for is_batched, one in zip(are_batched, alike, strict=True) if is_batched)
    numbers = {one: number for number, one in enumerate(first)}
    return tuple(numbers[one] if is_batched else None for is_batched, one in zip(are_batched, alike, strict=True))


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
