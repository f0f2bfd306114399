"""What a replica function does once for all replicas, in a merge_call, depends on nothing that is each one's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.kernel.ir.dataflow import PYTHON_OPS, using
from autodist_py.kernel.ir.graph import SEED_INPUT, SEEDED_RANDOM, GraphView
from autodist_py.proto.errors import CaptureError

_DRAWS = SEEDED_RANDOM | PYTHON_OPS
"""Op types whose results differ from call to call."""


class DoneForAll:
    """What is traced once for all replicas, and what in it each of them does to what is its own."""

    def __init__(self, container_of: Callable[[Any], Any], *, folds_seeds: bool = False):
        """Nothing is traced yet.

        Args:
            container_of: gives the variable that a replica's variable is a component of.
            folds_seeds: whether replicas draw other numbers, each its own, by one seed.
        """
        self._container_of = container_of
        self._draws = _DRAWS | SEED_INPUT.keys() if folds_seeds else _DRAWS
        self._read: dict[int, Any] = {}
        self._made: dict[bool, set[tf.Operation]] = {True: set(), False: set()}
        """The ops that are made for all, and those among them that are made for each."""
        self._is_active = False

    @contextmanager
    def for_all(self) -> Iterator[None]:
        """What is done within is done once for all replicas."""

        def note(variable: Any) -> None:
            if self._is_active:
                container = self._container_of(variable)
                self._read[id(container)] = container

        with tf_adapter.handle_uses(note), self._doing(for_all=True):
            yield

    @contextmanager
    def for_each(self) -> Iterator[None]:
        """What is done within, in `for_all`, each replica does to what is its own."""
        with self._doing(for_all=False):
            yield

    @contextmanager
    def _doing(self, *, for_all: bool) -> Iterator[None]:
        before, self._is_active = self._is_active, for_all
        graph, is_noted = tf.compat.v1.get_default_graph(), before or for_all
        first = len(graph.get_operations()) if is_noted else 0
        try:
            yield
        finally:
            self._is_active = before
        if is_noted:
            self._made[for_all] |= {*graph.get_operations()[first:]}

    def reads(self, variable: Any) -> bool:
        """Whether `variable`, one that replicas have a component of, is read for all."""
        return id(variable) in self._read

    def require_alike(self, graph: Any, view: GraphView) -> None:
        """Refuse what each replica would do otherwise: `view` is of the ops of `graph`, the function's.

        Raises:
            CaptureError: the op.
        """
        drawn = using(view, self._draws)
        for op in self._made[True] - self._made[False]:
            if op.type in self._draws or (op.graph is graph and op.name in drawn):
                raise CaptureError(
                    f"a merge_call draws random numbers, or calls Python, in '{op.name}' ({op.type}), which each "
                    "replica would do for itself. Draw them before, and give them to it: merge_call(merge_fn, "
                    "args=(numbers,))"
                )
