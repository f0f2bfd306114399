"""Whether what draws random numbers can draw the same on all replicas, each by itself."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from autodist_py.kernel.ir.dataflow import CLOCK, PYTHON_OPS
from autodist_py.kernel.ir.functions import with_called
from autodist_py.kernel.ir.graph import SEEDED_RANDOM

_STATELESS = "PyFuncStateless"
"""Of the same it computes the same, as its user has said (`tf.numpy_function(stateful=False)`)."""
_LOOPS = ("StatelessWhile", "While")
_OF_ALL = "of the whole batch, or of none of its examples"


def why_not_alike(node: tf.compat.v1.NodeDef, library: Mapping[str, Any]) -> str | None:
    """Why `node`, which is given the same on all replicas, cannot draw the same on all; None: it can.

    An op with a seed draws the same numbers, one draw after the other. In a loop whose turns overlap nothing says
    which turn draws first. The turns of `node` itself, if it is a loop, do not: see `Insertion.draw_alike`.

    Args:
        node: it draws, or runs functions that do.
        library: FunctionDefs by name.
    """
    for one in with_called(node, library):
        if one.op in PYTHON_OPS - {_STATELESS}:
            return f"is computed {_OF_ALL}, by Python"
        if one.op == CLOCK:
            return "reads the time in a loop, a branch or a function: call tf.timestamp() outside"
        if one.op in SEEDED_RANDOM and not (one.attr["seed"].i or one.attr["seed2"].i):
            return f"draws random numbers {_OF_ALL}, without a seed: give it one, or call tf.random.set_seed before"
        overlaps = one is not node and one.op in _LOOPS and one.attr["parallel_iterations"].i > 1
        if overlaps and any(within.op in SEEDED_RANDOM for within in with_called(one, library)):
            return (
                f"draws random numbers {_OF_ALL}, in an inner loop whose turns may be in any order: use "
                "tf.random.stateless_normal or the like, or parallel_iterations=1"
            )
    return None
