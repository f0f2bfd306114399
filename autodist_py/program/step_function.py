"""The step function that `@autodist.function` makes: one program per signature, found by what a call is given."""

import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.batch.looked_up import looked_up
from autodist_py.capture.doors.function import CapturedFunction, capture_function, step_signature
from autodist_py.capture.doors.retraced import Trace
from autodist_py.capture.recording.user_code import fixed_size, line_of, made_by
from autodist_py.config.settings import KEPT_PROGRAMS_VARIABLE
from autodist_py.program.calls import Call, Calls, is_plain
from autodist_py.program.kept_programs import Bound, KeptPrograms
from autodist_py.proto.errors import AutoDistError, CaptureError


class Program(Protocol):
    """A compiled step: tensors in, a value for each output of the item out.

    `goes_among` is as in `KeptPrograms.add`.
    """

    @property
    def goes_among(self) -> str: ...

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class _Made:
    """A program, what it was made of, and the structure of its call, which keeps alive what the key knows by its id."""

    program: Program
    captured: CapturedFunction
    structure: Any


class DistributedFunction:
    """A step function, compiled for the cluster; called like the function it was made from.

    Array arguments (tensors and numpy arrays) may change from call to call; the first dimension of the batched ones may
    change in size. Every other argument is a constant of the program, as in tf.function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        compile_program: Callable[[str, CapturedFunction], Program],
        *,
        name: str,
        options: CaptureOptions,
        batched: Collection[str] | None,
        own: Collection[str] = (),
        kept: Bound | None = None,
    ):
        """Distribute `function`.

        Args:
            function: a step of one device.
            compile_program: makes a program, of a name and what was captured.
            name: of the step's programs.
            options: what the user said about the batch.
            batched: see `AutoDist.function`.
            own: names of the arguments that each worker has of its own, though the batch is the same for all.
            kept: how many programs are kept; None: all.
        """
        self.python_function = function
        self.__doc__ = getattr(function, "__doc__", None)
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__wrapped__ = function
        self._name = name
        self._compile = compile_program
        self._options = options
        self._batched, self._own = batched, frozenset(own)
        self._calls = Calls(self.__name__, step_signature(function), batched)
        self._bound: list[DistributedFunction] = []
        self._kept = Bound(sys.maxsize, lambda said: None) if kept is None else kept
        self._programs = KeptPrograms[tuple[Any, ...], _Made](f"'{self.__name__}'", self._kept, self._remember)
        self._num_made = 0
        self._let_go: dict[tuple[Any, ...], Trace] = {}
        """What is remembered of those that were let go."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step on the global batch; returns what one device would have returned.

        Raises:
            CaptureError: the step cannot be captured, or the arguments' batch dimensions differ.
            WorkerFailedError: another worker failed; the message names it.
        """
        if not tf.executing_eagerly():
            raise CaptureError(
                f"'{self.__name__}' is a distributed step, which is captured by itself, and was called {self._where()}"
            )
        call = self._calls.take_apart(args, kwargs)
        made = self._programs.use(call.key)
        if made is not None:
            try:
                return made.captured.result.pack(made.program.run(call.tensors))
            except tf.errors.InvalidArgumentError as error:
                self._explain(call, error, made.captured.graph)
                raise
        traced: tf.Graph | None = None
        try:
            captured = self._captured_as_before(call)
            traced = captured.graph
            made = _Made(self._compile(f"{self._name}/{self._num_made}", captured), captured, call.structure)
            values = made.program.run(call.tensors)
        except AutoDistError:
            raise
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            sizes = self._calls.sizes_message(call, error)
            if sizes:
                raise CaptureError(sizes) from error
            self._explain(call, error, traced)
            raise
        # Remembered only now: arguments that cannot be run together must not decide what the batch is.
        self._num_made += 1
        self._programs.add(call.key, made, made.program.goes_among)
        self._calls.remember(call)
        return captured.result.pack(values)

    def _explain(self, call: Call, error: Exception, graph: tf.Graph | None) -> None:
        """Let a failure on a replica's rows say at which of the user's lines, and what may have made it."""
        found = re.search(r"\{\{node AutoDist-Replica-\d+/([^}]+)\}\}", str(error))
        op = None if found is None or graph is None else made_by(graph, found[1])
        if op is None or call.examples is None:
            return
        error.add_note(f"'{op.name}' ({op.type}) was made in {line_of(op)}")
        fixed = fixed_size(op, call.examples)
        if fixed is not None:
            error.add_note(
                f"'{fixed.name}', made in {line_of(fixed)}, has {call.examples} rows whatever the batch, as the whole "
                "batch has; a replica is given its part of it. Write tf.shape(x)[0], or -1 in a reshape, for the "
                "number of examples"
            )
        elif shared := self._calls.sharing(call):
            error.add_note(
                f"each replica is given its part of {shared}, as all have the first one's number of rows. If one of "
                "them is no batch, such as weights of classes, name those that are: autodist.function(batched=[...])"
            )

    def _where(self) -> str:
        """Where it was called from, if not from plain Python, and the way out."""
        graph = tf.compat.v1.get_default_graph()
        if graph.building_function:
            return f"while the function '{graph.name}' is traced; call it from plain Python"
        return (
            "where a tf.Graph is built. Leave `tf.Graph().as_default()` (or what disables eager execution) out: "
            "variables are then made eagerly, and scope() is for Keras alone. Or leave @autodist.function out: build "
            "the step in the graph, and run it in autodist.create_distributed_session()"
        )

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A step may be a method."""
        if instance is None:
            return self
        bound = self.python_function.__get__(instance, owner)
        name = f"_distributed_{self.__name__}_{id(self)}"
        if name not in vars(instance):
            step = DistributedFunction(
                bound,
                self._compile,
                name=f"{self._name}-{len(self._bound)}",
                options=self._options,
                batched=self._batched,
                kept=self._kept,
            )
            self._bound.append(step)
            object.__setattr__(instance, name, step)
        return vars(instance)[name]

    def captured(self, *args: Any, **kwargs: Any) -> CapturedFunction:
        """The step as it is captured for these arguments; nothing is compiled or run."""
        return self._capture(self._calls.take_apart(args, kwargs))

    def clear(self) -> None:
        """Let go of all programs, also of those of the methods that were made from this."""
        self._programs.clear()
        self._let_go.clear()
        self._calls.clear()
        for step in self._bound:
            step.clear()

    def _remember(self, key: tuple[Any, ...], made: _Made) -> None:
        """The program of that signature is let go."""
        self._let_go[key] = Trace.of(made.captured)

    def _captured_as_before(self, call: Call) -> CapturedFunction:
        """The step as it is captured now, which is as it was when its program was let go, if one was.

        Raises:
            CaptureError: it is another; on one device it would still be what it was.
        """
        captured = self._capture(call)
        before = self._let_go.get(call.key)
        other = "" if before is None else before.other_than(captured)
        if other:
            raise CaptureError(
                f"'{self.__name__}' was traced again, as the program of this signature was let go, and {other} is "
                "another than before. Do not let a step depend on Python values that change, but on arguments or "
                f"variables; or set {KEPT_PROGRAMS_VARIABLE}, now {self._kept.most}, to as many signatures as there are"
            )
        return captured

    def _capture(self, call: Call) -> CapturedFunction:
        captured = capture_function(self.python_function, self._calls.arguments(call), call.structure, self._options)
        if self._batched is None and self._options.num_replicas > 1:
            self._require_no_table(call, captured)
        fed = (source.name for source in captured.item.inputs if source.kind == "feed")
        named = zip(self._calls.parameters(call), fed, strict=True)
        own = frozenset(fed_as for parameter, fed_as in named if parameter in self._own)
        return replace(captured, examples=call.examples, own=own, is_plain=is_plain(call.structure))

    def _require_no_table(self, call: Call, captured: CapturedFunction) -> None:
        """Refuse to share out what the step looks up in by labels, though it has the batch's number of elements."""
        for found in looked_up(captured.item):
            line = "" if captured.graph is None else line_of(captured.graph.get_operation_by_name(found.op))
            others = self._calls.batched_beside(call, found.table)
            raise CaptureError(
                f"'{self.__name__}' looks up elements of '{found.table}' by those of '{found.labels}'"
                f"{f' ({line})' if line else ''}, as weights of classes are. '{found.table}' has as many elements as "
                "the batch has examples, so each replica would be given a part of it. Name the arguments that are "
                f"batches: autodist.function(batched={others})"
            )
