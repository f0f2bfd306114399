"""Replicate: one copy of the step per local replica."""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import tensorflow as tf

from autodist_py.kernel.ir.dataflow import calling, random_ops, standing_once
from autodist_py.kernel.ir.graph import (
    DRAWN_ALIKE,
    PASSES_HANDLE,
    SEED_INPUT,
    SEEDED_RANDOM,
    SHOWS,
    VARIABLE_OP,
    GraphView,
    rename_functions,
)
from autodist_py.kernel.ir.names import on_replica, op_of
from autodist_py.kernel.ir.node import controls_of, node
from autodist_py.kernel.ir.tf_adapter import own_python_function
from autodist_py.kernel.program import Invariant, Program, Replication
from autodist_py.kernel.runner import Contract
from autodist_py.kernel.topology import is_gpu
from autodist_py.proto.errors import InvalidGraphError

_KEEPS_TAPE = frozenset({"EagerPyFunc"})  # TensorFlow keeps the tape of each call, for its gradient
_SEED_STRIDE = 0x9E3779B1  # odd and far from small user seeds, so that replicas' streams do not meet


@dataclass(frozen=True, slots=True)
class Replicate:
    """One copy of the step per local replica.

    Ensures: op `n` stands as `AutoDist-Replica-<i>/n` on replica i's device (an op that the user put on a CPU stays on
        one, and what reads or writes a variable is where the variable is), with the replica's own variables,
        control-flow frames, random streams and tapes of Python functions; the stream of the cluster's first replica
        is that of one device.
        Ops that are marked `DRAWN_ALIKE` have it on all replicas, and the functions that they run, of which each
        replica has its own. Stateless random ops draw the same on all, unless
        the option `folds_seeds` is on. What is stateful but shared (inputs, iterators, lookup tables) stands once,
        under its own name; inputs that are each replica's own part do not. What shows something to the user (tf.print,
        summaries) does so on the cluster's first replica only. Every op has a device, so colocation groups, some of
        whose ops are not part of the program, are dropped.

    Example, on one worker of two replicas: `w -= mean(x)`.

        - mean = Mean(x, rows)
        - gradient/w = Identity(mean)
        - update = AssignSubVariableOp(w, gradient/w)
        + 0/mean = Mean(x, 0/rows)
        + 0/gradient/w = Identity(0/mean)
        + 0/update = AssignSubVariableOp(0/w, 0/gradient/w)
        + 1/mean = Mean(x, 1/rows)
        + 1/gradient/w = Identity(1/mean)
        + 1/update = AssignSubVariableOp(1/w, 1/gradient/w)
        ...
    """

    name: ClassVar[str] = "replicate"
    contract: ClassVar[Contract] = Contract(
        requires={Invariant.CAPTURED, Invariant.SCHEDULED},
        ensures={Invariant.REPLICATED},
        ends={Invariant.CAPTURED},
    )

    def __call__(self, program: Program) -> Program:
        view = program.graph
        shared = _shared(program)
        folded = frozenset(SEED_INPUT) if program.options.folds_seeds else frozenset()
        own = calling(view, SEEDED_RANDOM | folded | _KEEPS_TAPE)
        differing = random_ops(view) | {node.name for node in view.of_type(SHOWS)}
        alike = {node.name for node in view.nodes.values() if DRAWN_ALIKE in node.attr}
        drawing = calling(view, SEEDED_RANDOM) if alike else set()
        holders = _holders(view)
        nodes = [_once(view.nodes[name], program.topology.host) for name in view.nodes if name in shared]
        functions: list[tf.compat.v1.NodeDef] = []
        for position, replica in enumerate(program.topology.local_replicas):
            renamed = {name: f"{name}_replica_{replica.index}" for name in own} if replica.index else {}
            for name, original in view.nodes.items():
                if name in shared:
                    continue
                moved = _moved(original, position, shared)
                moved.device = _own_device(view.nodes[holders.get(name, name)], position, replica.device)
                if replica.index and name in differing:
                    in_loop = name in view.control_flow.frames
                    silent = _silent(moved, in_loop=in_loop)
                    nodes += _own_streams([silent], replica.index, renamed, folded, in_loop=in_loop)
                else:
                    nodes.append(moved)
                if replica.index and name in alike:
                    rename_functions(moved, _alike(drawing, replica.index))
            functions += _own_functions(view, replica.index, renamed, folded)
            functions += _alike_functions(view, _alike(drawing, replica.index) if replica.index else {})
        result = replace(program, graph=view.made_of(nodes, functions), replication=Replication(frozenset(shared)))
        return replace(
            result,
            fetches=tuple(_fetches(program, result)),
            run_ops=tuple(copy for name in program.run_ops for copy in result.copies(name)),
        )


def _alike(functions: Collection[str], replica: int) -> dict[str, str]:
    """The names of a replica's own copies of functions that draw what all replicas draw: an op's state is its own."""
    return {name: f"{name}_alike_{replica}" for name in functions}


def _alike_functions(view: GraphView, renamed: Mapping[str, str]) -> Iterator[tf.compat.v1.NodeDef]:
    for name, own_name in sorted(renamed.items()):
        function = copy.deepcopy(view.library[name])
        function.signature.name = own_name
        for one in function.node_def:
            rename_functions(one, renamed)
        yield function


def _fetches(captured: Program, replicated: Program) -> Iterator[str]:
    """What stands for each output: its copy on the first replica, or those on all."""
    for output, (name,) in captured.fetched():
        copies = list(replicated.copies(name))
        if not output.per_replica:
            yield copies[0]
        else:  # What stands once is that of all.
            yield from copies if len(copies) > 1 else copies * replicated.num_local_replicas


def _shared(program: Program) -> set[str]:
    view = program.graph
    shared = standing_once(program.item, view)
    variables = sorted(name for name in shared if view.nodes[name].op == VARIABLE_OP)
    if variables:
        raise InvalidGraphError(
            f"an iterator or lookup table is made from the value of variable '{variables[0]}', so that it would differ "
            "between replicas; make it from constants"
        )
    return shared


def _once(original: tf.compat.v1.NodeDef, host: str) -> tf.compat.v1.NodeDef:
    """A copy of `original` that stands once on this worker."""
    node = copy.deepcopy(original)
    node.device = node.device or host
    node.attr.pop("_class", None)
    return node


def _holders(view: GraphView) -> dict[str, str]:
    """For each op that is given a variable's handle, and for the handle, the handle."""
    found = {node.name: node.name for node in view.of_type({VARIABLE_OP})}
    pending = list(found)
    while pending:
        holder = pending.pop()
        for user in sorted(view.dataflow_consumers([holder])):
            if user in found:
                continue
            found[user] = found[holder]
            if view.nodes[user].op in PASSES_HANDLE:
                pending.append(user)
    return found


def _moved(original: tf.compat.v1.NodeDef, position: int, shared: set[str]) -> tf.compat.v1.NodeDef:
    """A copy of `original` in local replica `position`."""
    node = copy.deepcopy(original)
    node.name = on_replica(position, original.name)
    node.attr.pop("_class", None)
    for index, name in enumerate(original.input):
        if op_of(name) not in shared:
            node.input[index] = on_replica(position, name)
    if "frame_name" in node.attr:
        node.attr["frame_name"].s = on_replica(position, node.attr["frame_name"].s.decode()).encode()
    return node


def _own_device(original: tf.compat.v1.NodeDef, position: int, device: str) -> str:
    """Where an op stands in local replica `position`, whose device is `device`, and where what reads or writes it does.

    What the user put on a CPU stays on one: on the replica's own, if it has one. A variable of the first replica is the
    user's own, and where the user put it.
    """
    is_on_cpu = "CPU" in original.device.upper()
    is_users_own = position == 0 and original.op == VARIABLE_OP
    return original.device if is_on_cpu and (is_users_own or is_gpu(device)) else device


def _silent(original: tf.compat.v1.NodeDef, *, in_loop: bool) -> tf.compat.v1.NodeDef:
    """`original`; in the place of one that shows something to the user, one that only waits as it does.

    In a loop of TensorFlow 1 it waits for what it would show, too: what has no input stands in no loop.
    """
    if original.op not in SHOWS:
        return original
    waits = sorted(set(map(op_of, original.input))) if in_loop else controls_of(original)
    return node("NoOp", original.name, controls=waits, like=original)


def _own_streams(
    nodes: Iterable[tf.compat.v1.NodeDef],
    replica: int,
    renamed: dict[str, str],
    folded: Collection[str],
    *,
    in_function: bool = False,
    in_loop: bool = False,
) -> Iterator[tf.compat.v1.NodeDef]:
    """`nodes`, edited: random ops have the replica's own seeds, and Python functions its own tapes.

    Calls of functions that have such ops are of the replica's own functions.
    The replica's number is folded into the seed of a stateless op, of the types `folded`, by an op before it.
    """
    for one in nodes:
        yield one
        if one.op in SEEDED_RANDOM:
            seeds = (one.attr["seed"].i, one.attr["seed2"].i)
            if seeds != (0, 0):
                one.attr["seed2"].i = (seeds[1] + replica * _SEED_STRIDE) % 2**31
        elif one.op in _KEEPS_TAPE:
            one.attr["token"].s = own_python_function(one.attr["token"].s.decode(), f"_replica_{replica}").encode()
        elif one.op in folded:
            yield from _fold(one, replica, in_function=in_function, in_loop=in_loop)
        if renamed:
            rename_functions(one, renamed)


def _fold(
    drawn: tf.compat.v1.NodeDef, replica: int, *, in_function: bool, in_loop: bool
) -> tuple[tf.compat.v1.NodeDef, tf.compat.v1.NodeDef]:
    """Two ops that make the seed of `drawn` the replica's own; in a function, results are named as they are there.

    A constant stands in the loop of TensorFlow 1 in which something is that it waits for.
    """
    dtype = tf.as_dtype(drawn.attr["Tseed"].type) if "Tseed" in drawn.attr else tf.uint64
    number = np.array(replica * _SEED_STRIDE % 2**31, dtype.as_numpy_dtype)
    position = SEED_INPUT[drawn.op]
    seed = drawn.input[position]
    waits = [op_of(seed)] if in_loop else []
    constant = node("Const", f"{drawn.name}/replica", controls=waits, like=drawn, dtype=dtype, value=number)
    both = [seed, f"{constant.name}:output:0" if in_function else constant.name]
    folded = node("BitwiseXor", f"{drawn.name}/own_seed", both, like=drawn, T=dtype)
    drawn.input[position] = f"{folded.name}:z:0" if in_function else folded.name
    return constant, folded


def _own_functions(
    view: GraphView, replica: int, renamed: dict[str, str], folded: Collection[str]
) -> Iterator[tf.compat.v1.NodeDef]:
    for name, own_name in sorted(renamed.items()):
        function = copy.deepcopy(view.library[name])
        function.signature.name = own_name
        nodes = list(_own_streams(list(function.node_def), replica, renamed, folded, in_function=True))
        del function.node_def[:]
        function.node_def.extend(nodes)
        yield function
