"""Which line of the user's code has made an op of a traced graph."""

import inspect
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

_FOREIGN = ("/site-packages/", "/dist-packages/", f"{Path(__file__).parents[2]}/", "<frozen")
_NORMALIZATIONS = (
    ("tensorflow/python/ops/nn_impl.py", "batch_normalization"),
    ("keras/src/layers/normalization/batch_normalization.py", ""),
)
"""Files that end so, and the function there, or all: what a batch normalization is made of."""


def line_of(op: tf.Operation) -> str:
    """The innermost line that is no library's, such as `train.py, line 7: tf.reshape(x, [8, 3])`; "": there is none."""
    own = [frame for frame in op.traceback if not any(part in frame.filename for part in _FOREIGN)]
    if not own:
        return ""
    code = linecache.getline(own[-1].filename, own[-1].lineno).strip()
    return f"{own[-1].filename}, line {own[-1].lineno}: {code}"


def is_users(function: Callable[..., Any]) -> bool:
    """Whether the function is no library's, as far as its code says where it is from."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or not any(part in code.co_filename for part in _FOREIGN)


def made_by(graph: tf.Graph, name: str) -> tf.Operation | None:
    """The op of that name; for one of back-propagation, the op that it is the gradient of, where that is seen."""
    known = {op.name: op for op in graph.get_operations()}
    wanted = name.removeprefix("gradient_tape/")
    while wanted:
        if wanted in known:
            return known[wanted]
        wanted = wanted.rpartition("/")[0]
    return known.get(name)


def line_in(graph: tf.Graph | None, name: str) -> str:
    """The line of the op of that name, or for one of back-propagation, of the op that it is of; "": it is not known."""
    op = None if graph is None else made_by(graph, name)
    return "" if op is None else line_of(op)


def fixed_size(op: tf.Operation, size: int) -> tf.Operation | None:
    """What the op reads, or itself, whose first dimension is fixed to that size; None: nothing is."""
    for tensor in (*op.inputs, *op.outputs):
        if tensor.shape.rank and tensor.shape[0] == size:
            return tensor.op
    return None


def normalizes_batch(op: tf.Operation) -> bool:
    """Whether the op is a part of a batch normalization of TensorFlow's or Keras's."""
    return op.type.startswith("FusedBatchNorm") or any(
        frame.filename.endswith(file) and function in (frame.name, "")
        for frame in op.traceback
        for file, function in _NORMALIZATIONS
    )
