"""What a session runs: a program for each signature of feeds and fetches, cut out of the captured graph."""

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.graph import GraphScope, Signature
from autodist_py.capture.recording.user_code import line_in
from autodist_py.cluster.member import HEAR_SECONDS
from autodist_py.diagnostics.recording import RecordedProgram, Recorder
from autodist_py.kernel.ir.dataflow import analyse, gradient_types, made_of_what_is_given, op_types
from autodist_py.kernel.ir.graph import SHARED_BY_NAME
from autodist_py.kernel.ir.names import op_of
from autodist_py.program.build import CapturedStep, Compiler
from autodist_py.program.executor import shared_name
from autodist_py.program.one_signature import one_signature, part_of, require_replicas
from autodist_py.program.step import StepProgram
from autodist_py.proto.errors import SessionError
from autodist_py.proto.graph_item import GraphItem, Variable

_OPTIMIZES = ("ResourceApply", "ResourceSparseApply")
"""What the types of optimizers' own ops begin with."""


class Program(Protocol):
    """Tensors in, in the order of the signature's feeds; a value for each of its fetches out.

    `goes_among` is as in `KeptPrograms.add`.
    """

    @property
    def goes_among(self) -> str: ...

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]: ...


class SessionPrograms(Protocol):
    """Makes the programs of one session, and owns the values of its variables."""

    def make(self, signature: Signature, feeds: Sequence[tf.Tensor]) -> Program:
        """The program of a signature that was not asked for before, and is now, with these values for its feeds."""
        ...

    def agreed(self, signature: Signature, *, hooked: bool) -> Signature:
        """What all workers run where this one asks for `signature`; `hooked`: workers may ask for different ones."""
        ...

    def of_chief(self, value: str) -> str:
        """The chief's `value`; every worker calls it."""
        ...

    def take_chiefs_values(self, variables: Iterable[str]) -> None:
        """Give the variables of these names the chief's values; every worker calls it."""
        ...

    def close(self) -> None:
        """Let go of all values."""
        ...


class DistributedPrograms:
    """Programs of the cluster: what trains is a step of all workers, all else is run by the asking worker alone."""

    def __init__(
        self, scope: GraphScope, compiler: Compiler, options: CaptureOptions, recorder: Recorder | None = None
    ):
        """Take the graph as it is now for what is trained; steps are recorded where there is a `recorder`."""
        self._scope = scope
        self._compiler = compiler
        self._options = options
        self._alone = replace(options, batch="global")  # One worker's own run is of all that it is given.
        self._recorder = recorder
        self._captured = frozenset(op.name for op in scope.graph.get_operations())
        self._strategy = compiler.strategy(scope.item(options))
        if scope.synchronized is not None:
            require_replicas(scope.synchronized, compiler)
        with tf_adapter.eagerly():
            self._variables = {name: _make(variable) for name, variable in scope.variables().items()}
        self._namespace = uuid.uuid4().hex
        self._made = 0
        self._trains: dict[Signature, bool] = {}
        self._first: Signature | None = None
        """Where workers take their steps by themselves, what their steps fetch."""
        self._initialize()

    def _initialize(self) -> None:
        """Give all variables their initial values, the chief's: a script need not run an initializer."""
        initializers = self._scope.initializers()
        if not initializers:
            return
        item = self._scope.cut(Signature((), (), tuple(initializers.values())), self._alone)
        variables = {name: self._variables[name] for name in initializers}
        with tf_adapter.eagerly():
            used = {variable.name: self._variables[variable.name] for variable in item.variables}
            name = "session_initial_values"
            step = CapturedStep(item=item, variables=used, name=name, namespace=self._namespace)
            self._compiler.alone(step).run([])
            self._compiler.values.broadcast(variables)

    def make(self, signature: Signature, feeds: Sequence[tf.Tensor]) -> Program:
        """See SessionPrograms.

        Raises:
            SessionError: it needs variables or training ops that were added to the graph later, or trains on nothing
                that is batched.
        """
        item = self._scope.cut(signature, self._alone)
        if item.gradients and self._options != self._alone:
            item = self._scope.cut(signature, self._options)
        if item.gradients and self._compiler.topology(self._strategy).num_replicas > 1:
            _require_batch(item)
        self._require_captured(item)
        variables = {variable.name: self._variables[variable.name] for variable in item.variables}
        batched = {source.name for source in item.inputs if source.batched}
        given = zip(signature.feeds, feeds, strict=True)
        step = CapturedStep(
            item=item,
            variables=variables,
            name=f"session_{self._made}",
            namespace=self._namespace,
            examples=next((value.shape[0] for fed, value in given if op_of(fed) in batched), None),
            line_of=partial(line_in, self._scope.graph),
        )
        self._made += 1
        if not item.gradients:
            self._require_recorded(item)
            return self._compiler.alone(step)
        compiled = self._compiler.distributed(step, self._strategy)
        program = _SessionStep(compiled, variables, self._compiler)
        if self._recorder is None:
            return program
        return _recorded(program, self._recorder, item, lambda: variables, signature)

    def agreed(self, signature: Signature, *, hooked: bool) -> Signature:
        """See SessionPrograms. A step of all workers fetches what any of them asks for; all else is one's own.

        Raises:
            SessionError: the workers feed different tensors; or they take their steps by themselves, and this one
                fetches what the first step did not.
        """
        alone = self._compiler.cluster.num_workers == 1
        if alone or not (hooked or self._scope.synchronized) or not self._is_step(signature):
            return signature
        if self._first is not None:
            return part_of(self._first, signature)
        self._compiler.parameter_servers.pause()
        own = json.dumps([signature.feeds, signature.fetches, signature.targets]).encode()
        key = self._compiler.agreement.key("fetches")
        together = one_signature(self._compiler.cluster.compare(key, own, timeout=HEAR_SECONDS))
        if not self._strategy.consistency.is_bsp:
            self._first = together
        return together

    def _is_step(self, signature: Signature) -> bool:
        if signature not in self._trains:
            self._trains[signature] = bool(self._scope.cut(signature, self._alone).gradients)
        return self._trains[signature]

    def of_chief(self, value: str) -> str:
        """See SessionPrograms."""
        return self._compiler.agreement.chiefs("session", value)

    def take_chiefs_values(self, variables: Iterable[str]) -> None:
        """See SessionPrograms."""
        known = {name: self._variables[name] for name in variables}
        self._compiler.values.written_alone(known)
        self._compiler.values.broadcast(known)

    def close(self) -> None:
        """See SessionPrograms. Its iterators and queues end, too: who waits at a queue is told that it is closed."""
        self._variables.clear()
        for op in self._scope.graph.get_operations():
            if op.type in SHARED_BY_NAME:
                own = op.get_attr("shared_name").decode()
                tf_adapter.end_resource(op, shared_name(self._namespace, op.name, own))

    def _require_recorded(self, item: GraphItem) -> None:
        """Refuse an optimizer's update with a gradient that was not seen: every worker would train by itself.

        What is made of variables alone, as of gradients that earlier runs have added up, is the same on all of them.
        """
        if self._options.num_workers == 1:
            return
        types, given = op_types(item), made_of_what_is_given(item)
        for variable in item.variables:
            for op in variable.update_ops:
                if types[op].startswith(_OPTIMIZES) and op in given:
                    raise SessionError(
                        f"'{op}' ({types[op]}) trains '{variable.name}' with a gradient that was not computed in "
                        "scope(), so that every worker would train by itself. Build the graph in scope(), minimize() "
                        "and its like at least"
                    )

    def _require_captured(self, item: GraphItem) -> None:
        """Refuse what was added too late to be part of the strategy: variables, and what trains them."""
        varying = analyse(item).varying
        trained = {gradient.variable for gradient in item.gradients}
        late = [variable.name for variable in item.variables if variable.name not in self._captured]
        late += [
            op
            for variable in item.variables
            for op in variable.update_ops
            if op not in self._captured and (op in varying or variable.name in trained)
        ]
        if late:
            raise SessionError(
                f"the graph was edited after the session was created: {', '.join(late)} would not be trained as the "
                "strategy says. Build variables and training ops in scope(), before create_distributed_session()"
            )


class _SessionStep:
    """A training step of the session: it begins from the chief's values where a run by one worker wrote others."""

    def __init__(self, step: StepProgram, variables: Mapping[str, tf.Variable], compiler: Compiler):
        self._step = step
        self.goes_among = step.goes_among
        self._variables = variables
        self._compiler = compiler

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """A value for each fetch."""
        self._compiler.values.broadcast(self._variables)
        return self._step.run(feeds)


class OneDevicePrograms:
    """The user's own graph on one device, run by a session of TensorFlow's; steps are recorded."""

    def __init__(self, scope: GraphScope, options: CaptureOptions, recorder: Recorder):
        self._scope, self._options, self._recorder = scope, options, recorder
        self._session = tf.compat.v1.Session(graph=scope.graph)

    def make(self, signature: Signature, feeds: Sequence[tf.Tensor]) -> Program:
        """See SessionPrograms."""
        item = self._scope.cut(signature, self._options)
        program = _SessionRun(self._session, signature)
        if not item.gradients:
            return program
        reads = {variable.name: self._read(variable) for variable in item.variables}
        return _recorded(program, self._recorder, item, lambda: self._session.run(reads), signature)

    def agreed(self, signature: Signature, *, hooked: bool) -> Signature:
        """See SessionPrograms."""
        return signature

    def of_chief(self, value: str) -> str:
        """See SessionPrograms."""
        return value

    def take_chiefs_values(self, variables: Iterable[str]) -> None:
        """See SessionPrograms. There is the chief alone."""

    def close(self) -> None:
        """See SessionPrograms."""
        self._session.close()

    def _read(self, variable: Variable) -> tf.Tensor:
        handle = self._scope.graph.get_tensor_by_name(f"{variable.name}:0")
        for reader in handle.consumers():  # A graph that a monitored session has finalized takes no more ops.
            if reader.type == "ReadVariableOp" and not reader.control_inputs:
                return reader.outputs[0]
        with self._scope.graph.as_default(), tf.control_dependencies(None):
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(variable.dtype))


class _SessionRun:
    """One signature, run by TensorFlow's session."""

    goes_among = ""
    """No other programs: the session keeps what it needs of each."""

    def __init__(self, session: tf.compat.v1.Session, signature: Signature):
        self._session, self._signature = session, signature

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """A value for each fetch."""
        fetches = (list(self._signature.fetches), list(self._signature.targets))
        values, _ = self._session.run(fetches, dict(zip(self._signature.feeds, map(np.asarray, feeds), strict=True)))
        return list(values)


def _recorded(
    program: Program,
    recorder: Recorder,
    item: GraphItem,
    variables: Callable[[], Mapping[str, Any]],
    signature: Signature,
) -> RecordedProgram:
    return RecordedProgram(
        program,
        recorder,
        item,
        variables,
        num_results=len(signature.fetches),
        op_types=op_types(item),
        computed_in=gradient_types(item),
    )


def _require_batch(item: GraphItem) -> None:
    """Refuse a step none of whose inputs is batched: every replica would train on all that is fed."""
    static = [source for source in item.inputs if source.shape or source.shape is None]
    if static and not any(source.batched for source in item.inputs):
        shapes = ", ".join(
            f"'{source.name}' {'of unknown rank' if source.shape is None else list(source.shape)}" for source in static
        )
        raise SessionError(
            "a step is shared out by the first dimension of its placeholders, which must be None for the batch; "
            f"received static shapes: {shapes}. Make it None: tf.compat.v1.placeholder(dtype, [None, ...])"
        )


def _make(variable: Variable) -> tf.Variable:
    dtype, shape = tf.as_dtype(variable.dtype), tf.TensorShape(variable.shape)
    return tf_adapter.uninitialized_variable(variable.name, dtype, shape, trainable=variable.trainable)
