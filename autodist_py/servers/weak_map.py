"""What is known about the user's variables, as long as they live."""

import weakref
from typing import Generic, TypeVar

import tensorflow as tf

Fact = TypeVar("Fact")


class WeakIdentityMap(Generic[Fact]):
    """A fact for each of some variables; it goes when its variable does. By identity, as variables are not hashable."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[weakref.ref[tf.Variable], Fact]] = {}

    def __contains__(self, variable: tf.Variable) -> bool:
        return id(variable) in self._facts

    def __getitem__(self, variable: tf.Variable) -> Fact:
        return self._facts[id(variable)][1]

    def __setitem__(self, variable: tf.Variable, fact: Fact) -> None:
        key = id(variable)
        self._facts[key] = (weakref.ref(variable, lambda _: self._facts.pop(key, None)), fact)

    def items(self) -> list[tuple[tf.Variable, Fact]]:
        """The variables that still live, and their facts, in the order in which they became known."""
        alive = ((reference(), fact) for reference, fact in list(self._facts.values()))
        return [(variable, fact) for variable, fact in alive if variable is not None]

    def discard(self, variable: tf.Variable) -> None:
        """Forget what is known about `variable`, if anything is."""
        self._facts.pop(id(variable), None)

    def clear(self) -> None:
        """Forget all."""
        self._facts.clear()
