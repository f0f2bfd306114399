"""All that the kernel uses of TensorFlow's private modules: collectives, what ops return, Python functions."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.framework import c_api_util, op_def_registry
from tensorflow.python.ops import collective_ops, script_ops


class Group(NamedTuple):
    """Who takes part in a collective, and which one it is.

    Attributes:
        size: the number of members.
        key: names the group.
        instance: names the collective among those of the group; a number, or a scalar int32 tensor.
        hint: the engine, as TensorFlow names it ("ring", "nccl", "auto").
    """

    size: int
    key: int
    instance: int | tf.Tensor
    hint: str


def all_reduce(value: tf.Tensor, group: Group) -> tf.Tensor:
    """The sum of the members' values: the same shape, on every one of them."""
    return collective_ops.all_reduce_v2(
        value, group.size, group.key, group.instance, merge_op="Add", final_op="Id", communication_hint=group.hint
    )


def all_gather(value: tf.Tensor, group: Group) -> tf.Tensor:
    """The members' values, which have equal shapes, one after the other along axis 0, in rank order."""
    return collective_ops.all_gather_v2(value, group.size, group.key, group.instance, communication_hint=group.hint)


def broadcast_send(value: tf.Tensor, group: Group) -> tf.Tensor:
    """The value, of a static shape, which all other members of the group receive."""
    return collective_ops.broadcast_send_v2(value, group.size, group.key, group.instance, communication_hint=group.hint)


def broadcast_receive(shape: tf.TensorShape, dtype: tf.DType, group: Group) -> tf.Tensor:
    """The value, of this shape and type, that the one member that sends has sent."""
    return collective_ops.broadcast_recv_v2(
        tf.constant(shape.as_list(), tf.int32),
        dtype,
        group.size,
        group.key,
        group.instance,
        communication_hint=group.hint,
    )


def output_type(node: tf.compat.v1.NodeDef, index: int) -> tf.DType:
    """The type of the `index`-th result of `node`."""
    types: list[int] = []
    for result in op_def_registry.get(node.op).output_arg:
        if result.type_list_attr:
            types += node.attr[result.type_list_attr].list.type
        else:
            count = node.attr[result.number_attr].i if result.number_attr else 1
            types += [result.type or node.attr[result.type_attr].type] * count
    return tf.as_dtype(types[index])


def result_index(node: tf.compat.v1.NodeDef, argument: str) -> int:
    """Which of the results of `node` is the first of those that its op type calls `argument`, as functions do."""
    index = 0
    for result in op_def_registry.get(node.op).output_arg:
        if result.name == argument:
            return index
        is_list = bool(result.type_list_attr)
        count = node.attr[result.number_attr].i if result.number_attr else 1
        index += len(node.attr[result.type_list_attr].list.type) if is_list else count
    raise KeyError(f"{node.op} has no result '{argument}'")


def argument_names(node: tf.compat.v1.NodeDef) -> list[str]:
    """What the op type of `node` calls each input; only for types whose inputs are no lists."""
    return [argument.name for argument in op_def_registry.get(node.op).input_arg]


@cache
def attribute_names(op_type: str) -> frozenset[str]:
    """The attributes that ops of the type have."""
    definition = op_def_registry.get(op_type)
    return frozenset(one.name for one in definition.attr) if definition else frozenset()


def is_stateful(node: tf.compat.v1.NodeDef) -> bool:
    """Whether the op does something, or depends on something, beside what it reads and returns; a function may."""
    definition = op_def_registry.get(node.op)
    return definition is None or bool(definition.is_stateful)


def own_attributes(node: tf.compat.v1.NodeDef) -> dict[str, tf.compat.v1.AttrValue]:
    """The attributes of the op that differ from what its type has by default, by name; but colocation groups."""
    definition = op_def_registry.get(node.op)
    known = definition.attr if definition else ()
    defaults = {one.name: one.default_value for one in known if one.HasField("default_value")}
    return {key: value for key, value in sorted(node.attr.items()) if key != "_class" and defaults.get(key) != value}


def keeps_state(op_type: str) -> bool:
    """Whether an op of that type may keep something itself from run to run: not in a resource that it is given."""
    definition = op_def_registry.get(op_type)
    if definition is None:
        return True
    return definition.is_stateful and all(each.type != tf.resource.as_datatype_enum for each in definition.input_arg)


def own_python_function(token: str, suffix: str) -> str:
    """Registers the `tf.py_function` known by `token` once more; returns that copy's token, which ends in `suffix`.

    TensorFlow keeps the tape of a call for its gradient, one tape for each token. So copies that run side by side need
    tokens of their own, by which their gradients find the tapes. Returned as it is: a token that this process does not
    know, and that of a `tf.numpy_function`, which has no gradient.
    """
    registered = script_ops._py_funcs.get(token)
    if not isinstance(registered, script_ops.EagerFunc):
        return token
    own = token + suffix
    copy = registered
    if registered._is_grad_func:
        copy = script_ops.EagerFunc(_own_gradient(registered, suffix), registered._out_dtypes, is_grad_func=True)
        vars(registered).setdefault("autodist_copies", {})[own] = copy  # The registry does not keep it alive.
    script_ops._py_funcs._funcs[own] = copy
    return own


def _own_gradient(registered: script_ops.EagerFunc, suffix: str) -> Callable[..., list[tf.Tensor | None]]:
    """What `registered`, a gradient, does, by the tape of the forward function whose token ends in `suffix`."""
    function = inspect.unwrap(registered._func)
    forward = inspect.getclosurevars(function).nonlocals["token"] + suffix.encode()

    def gradient(*gradients: tf.Tensor) -> list[tf.Tensor | None]:
        tape, inputs, outputs = script_ops.tape_cache.pop(forward)
        return tape.gradient(outputs, inputs, output_gradients=gradients)

    return gradient


def require_importable(graph: tf.compat.v1.GraphDef) -> None:
    """Let TensorFlow's runtime read `graph`, as it does where it is run.

    Raises:
        Exception: what is wrong with it, as TensorFlow says; of several types.
    """
    options = c_api_util.ScopedTFImportGraphDefOptions()
    buffer = c_api.TF_NewBufferFromString(graph.SerializeToString())
    try:
        with tf.Graph()._c_graph.get() as c_graph:
            c_api_util.ScopedTFImportGraphDefResults(
                c_api.TF_GraphImportGraphDefWithResults(c_graph, buffer, options.options)
            )
    finally:
        c_api.TF_DeleteBuffer(buffer)
