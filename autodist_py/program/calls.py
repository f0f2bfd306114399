"""`Calls`: what a step function is called with, taken apart into tensors, what is batched of them, and constants."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import Signature
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.capture.doors.function import Argument, Slot, argument_names
from autodist_py.proto.errors import CaptureError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, tf.DType, type, Enum)
"""Types of constants that a signature remembers by their values, at no cost."""


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


class Calls:
    """Takes apart the calls of one step function."""

    def __init__(self, title: str, signature: Signature, batched: Collection[str] | None):
        """Of the function with that name and signature, whose arguments `batched` are (see `AutoDist.function`)."""
        self._title = title
        self._signature = signature
        self._batched = None if batched is None else frozenset(batched)
        self._before: dict[tuple[Any, ...], tuple[bool, ...]] = {}
        """What was batched in the first call of a kind that could be run."""

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
        elif kind in self._before:
            wanted = self._before[kind]
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
                f"the batched arguments of '{self._title}' must have the same number of examples (first dimension); "
                f"received shapes {described}{advice}"
            )
        return wanted

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
        self._before.setdefault(call.kind, call.batched)

    def clear(self) -> None:
        """Forget all calls."""
        self._before.clear()

    def arguments(self, call: Call) -> list[Argument]:
        """The tensor arguments as they are captured, a batched one for any number of examples."""
        return [
            Argument(
                name, tf.TensorSpec([None, *tensor.shape[1:]] if is_batched else tensor.shape, tensor.dtype), is_batched
            )
            for (_, name), tensor, is_batched in zip(
                self._names(call.structure), call.tensors, call.batched, strict=True
            )
        ]

    def parameters(self, call: Call) -> list[str]:
        """For each tensor argument the parameter that it is given to, or is in."""
        return [parameter for parameter, _ in self._names(call.structure)]

    def batched_beside(self, call: Call, argument: str) -> list[str]:
        """The parameters of the arguments that are batched, without one argument."""
        slots = zip(self._names(call.structure), call.batched, strict=True)
        return list(dict.fromkeys(parameter for (parameter, name), b in slots if b and name != argument))

    def sharing(self, call: Call) -> str:
        """The arguments that are batched by having the first one's size; "" if no other has, or the user says."""
        if self._batched is not None or sum(call.batched) <= 1:
            return ""
        names = [name for _, name in self._names(call.structure)]
        arguments = zip(names, call.tensors, call.batched, strict=True)
        return ", ".join(f"{name} {tensor.shape}" for name, tensor, is_batched in arguments if is_batched)

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
