"""The canonical form of a captured graph: what the user wrote, without the counters of the process that traced it.

Capturing the same code twice gives equal bytes: library functions are named by their content and sorted, what is inside
them is named by position, and attributes that hold counters, debug information or this process's configuration are
dropped, as are colocation groups, whose names are counted.
"""

import copy
import hashlib
from collections.abc import Collection

import tensorflow as tf

from autodist_py.kernel.ir.graph import functions_of, rename_functions

_DROPPED_ATTRIBUTES = frozenset(
    {
        "_class",
        "_gradient_op_type",
        "_XlaMustCompile",
        "config_proto",
        "_user_specified_name",
        "_forward_func_name",
        "_backward_func_name",
    }
)
_PAIRED = frozenset({"forward_function_name", "backward_function_name"})
"""Attributes of functions that were made for a gradient: counted names of each other, by which nothing calls them."""


def canonical(graph: tf.compat.v1.GraphDef, keep: Collection[str]) -> tf.compat.v1.GraphDef:
    """A new graph: the ops named in `keep`, in their order, and the functions they call, in canonical form."""
    library = _Library(graph)
    result = tf.compat.v1.GraphDef(versions=graph.versions)
    for node in graph.node:
        if node.name in keep:
            result.node.append(node)
            library.normalize(result.node[-1])
    result.library.function.extend(function for _, function in sorted(library.functions.items()))
    return result


class _Library:
    """Canonical functions, made as they are asked for: callees first, so that a name can be a hash of the content."""

    def __init__(self, graph: tf.compat.v1.GraphDef):
        self._original = {function.signature.name: function for function in graph.library.function}
        self._names: dict[str, str] = {}
        self.functions: dict[str, tf.compat.v1.NodeDef] = {}

    def normalize(self, node: tf.compat.v1.NodeDef) -> None:
        """Drop what `node` says about the process, and call canonical functions."""
        for attribute in _DROPPED_ATTRIBUTES & set(node.attr):
            if attribute == "config_proto":
                node.attr[attribute].s = b""
            else:
                del node.attr[attribute]
        node.ClearField("experimental_debug_info")
        if "task:" in node.device:  # Where an eager value that the step uses happens to be: on this worker.
            here = tf.DeviceSpec.from_string(node.device)
            node.device = tf.DeviceSpec(device_type=here.device_type, device_index=here.device_index).to_string()
        controls = sorted(name for name in node.input if name.startswith("^"))
        if controls:
            data = [name for name in node.input if not name.startswith("^")]
            node.ClearField("input")
            node.input.extend(data + controls)
        rename_functions(node, {name: self._canonical_name(name) for _, name in functions_of(node)})

    def _canonical_name(self, name: str) -> str:
        if name not in self._original:
            return name
        if name not in self._names:
            function = _numbered(self._original[name])
            for node in function.node_def:
                self.normalize(node)
            content = hashlib.sha256(function.SerializeToString(deterministic=True)).hexdigest()
            function.signature.name = f"function_{content[:16]}"
            self._names[name] = function.signature.name
            self.functions[function.signature.name] = function
        return self._names[name]


def _numbered(original: tf.compat.v1.NodeDef) -> tf.compat.v1.NodeDef:
    """A copy of a FunctionDef without a name, whose arguments, ops and results are named by their position."""
    function = copy.deepcopy(original)
    function.signature.name = ""
    function.signature.ClearField("description")
    for key in original.attr:
        if key.startswith("_") or key in _PAIRED:
            del function.attr[key]
    ops = {argument.name: f"arg_{index}" for index, argument in enumerate(function.signature.input_arg)}
    ops |= {node.name: f"{node.op}_{index}" for index, node in enumerate(function.node_def)}
    results = {argument.name: f"result_{index}" for index, argument in enumerate(function.signature.output_arg)}
    controls = {name: f"control_{index}" for index, name in enumerate(function.signature.control_output)}

    def renamed(name: str) -> str:
        prefix = "^" if name.startswith("^") else ""
        op, separator, port = name.removeprefix("^").partition(":")
        return f"{prefix}{ops[op]}{separator}{port}"

    for argument in function.signature.input_arg:
        argument.name = ops[argument.name]
    for argument in function.signature.output_arg:
        argument.name = results[argument.name]
    for index, name in enumerate(function.signature.control_output):
        function.signature.control_output[index] = controls[name]
    for node in function.node_def:
        node.name = ops[node.name]
        for index, name in enumerate(node.input):
            node.input[index] = renamed(name)
    _replace_map(function.ret, {results[key]: renamed(value) for key, value in original.ret.items()})
    _replace_map(function.control_ret, {controls[key]: ops[value] for key, value in original.control_ret.items()})
    return function


def _replace_map(target: dict[str, str], values: dict[str, str]) -> None:
    target.clear()
    for key, value in values.items():
        target[key] = value
