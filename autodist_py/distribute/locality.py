"""Localities of the tower API: where a value is, and which values an argument takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist_py.distribute import tf_adapter
from autodist_py.distribute.lazy_per_replica import LazyPerReplica


@dataclass(frozen=True, slots=True)
class Locality:
    """Where a value is.

    Attributes:
        kind: "T": each tower has its own. "M": all towers have the same. "V": all devices of a variable have the same.
            "N": it is one plain value.
        variable: the name of the variable, of "V".
    """

    kind: str
    variable: str = ""

    def __str__(self) -> str:
        return f"V({self.variable})" if self.kind == "V" else self.kind


T, M, N = Locality("T"), Locality("M"), Locality("N")


def of_variable(variable: Any) -> Locality:
    """The devices of `variable`."""
    return Locality("V", variable.name)


class Located(tf_adapter.Mirrored):
    """A mirrored value that knows its locality."""

    def __init__(self, values: tuple[Any, ...], locality: Locality):
        super().__init__(values)
        self.locality = locality


@tf_adapter.left_as_it_is
def locality_of(value: Any) -> Locality:
    """Where `value`, no structure of values, is. A variable of which each tower has its own value is T."""
    return next((locality(value) for kind, locality in _LOCALITIES.items() if isinstance(value, kind)), N)


_LOCALITIES: Mapping[type, Callable[[Any], Locality]] = {
    tf_adapter.SyncOnReadVariable: lambda _: T,
    tf.Variable: of_variable,
    tf_adapter.PerReplica: lambda _: T,
    Located: lambda value: value.locality,
    tf_adapter.Mirrored: lambda _: M,
}
"""The locality of a value of each class: of the first that it is of. A mirrored variable is a Mirrored, too."""


def located(value: Any, locality: Locality) -> Any:
    """`value`, of which what is mirrored knows that it is at `locality`."""

    def each(leaf: Any) -> Any:
        is_mirrored = isinstance(leaf, tf_adapter.Mirrored) and not isinstance(leaf, tf.Variable)
        return Located(leaf.values, locality) if is_mirrored else leaf

    return tf.nest.map_structure(each, value)


@dataclass(frozen=True, slots=True)
class Takes:
    """Which values an argument of a method takes.

    Attributes:
        argument: the method's and the argument's name, such as "update(): args".
        kinds: of the localities, such as "MVN".
        way_out: what to do with other values.
    """

    argument: str
    kinds: str
    way_out: str

    def require(self, value: Any, num_towers: int) -> None:
        """Refuse what is elsewhere in `value`, a structure. Of one tower a plain value is that of each tower, too.

        Raises:
            ValueError: a value has another locality, or as many values as another strategy has towers.
        """
        for leaf in tf.nest.flatten(value):
            locality = locality_of(leaf)
            is_of_the_tower = num_towers == 1 and locality == N and "T" in self.kinds
            if locality.kind not in self.kinds and not is_of_the_tower:
                raise ValueError(
                    f"{self.argument} takes values of locality {self._spelt()}; received one of locality {locality}: "
                    f"{leaf}. {self.way_out}"
                )
            number = _number_of(leaf, num_towers)
            if number != num_towers:
                raise ValueError(
                    f"{self.argument} takes values of {num_towers} towers; received one of locality {locality} of "
                    f"{number}: {leaf}. Use values and variables of one strategy"
                )

    def _spelt(self) -> str:
        *most, last = (f"{kind}(variable)" if kind == "V" else kind for kind in self.kinds)
        return f"{', '.join(most)} or {last}" if most else last


def _number_of(value: Any, num_towers: int) -> int:
    """Of how many towers `value` is. What towers give to a merge_call is not looked at: that would gather it."""
    is_known = isinstance(value, tf_adapter.DistributedValues) and not isinstance(value, LazyPerReplica)
    return len(value.values) if is_known else num_towers
