"""The step function that `@autodist.function` makes: one program per signature, found by what a call is given."""

import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.function import CapturedFunction
from autodist_py.program.kept_programs import Bound, KeptPrograms
from autodist_py.program.step_capture import StepCapture
from autodist_py.program.step_errors import explain
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
        self._capture = StepCapture(function, self.__name__, options, batched=batched, own=own)
        self._methods: list[DistributedFunction] = []
        self._kept = Bound(sys.maxsize, lambda said: None) if kept is None else kept
        self._programs = KeptPrograms[tuple[Any, ...], _Made](
            f"'{self.__name__}'", self._kept, lambda key, made: self._capture.remember(key, made.captured)
        )
        self._num_made = 0

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
        calls = self._capture.calls
        call = calls.take_apart(args, kwargs)
        made = self._programs.use(call.key)
        if made is not None:
            try:
                return made.captured.result.pack(made.program.run(call.tensors))
            except tf.errors.InvalidArgumentError as error:
                explain(error, call, made.captured.graph, shared=calls.sharing(call))
                raise
        traced: tf.Graph | None = None
        try:
            captured = self._capture.captured_as_before(call, most=self._kept.most)
            traced = captured.graph
            made = _Made(self._compile(f"{self._name}/{self._num_made}", captured), captured, call.structure)
            values = made.program.run(call.tensors)
        except AutoDistError:
            raise
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            sizes = calls.sizes_message(call, error)
            if sizes:
                raise CaptureError(sizes) from error
            explain(error, call, traced, shared=calls.sharing(call))
            raise
        # Remembered only now: arguments that cannot be run together must not decide what the batch is.
        self._num_made += 1
        self._programs.add(call.key, made, made.program.goes_among)
        calls.remember(call)
        return captured.result.pack(values)

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
                name=f"{self._name}-{len(self._methods)}",
                options=self._capture.options,
                batched=self._capture.batched,
                kept=self._kept,
            )
            self._methods.append(step)
            object.__setattr__(instance, name, step)
        return vars(instance)[name]

    def captured(self, *args: Any, **kwargs: Any) -> CapturedFunction:
        """The step as it is captured for these arguments; nothing is compiled or run."""
        return self._capture.captured(self._capture.calls.take_apart(args, kwargs))

    def clear(self) -> None:
        """Let go of all programs, also of those of the methods that were made from this."""
        self._programs.clear()
        self._capture.clear()
        for step in self._methods:
            step.clear()


class StepFunctions:
    """The step functions that one AutoDist object distributes."""

    def __init__(self, name: str, options: CaptureOptions, kept: Bound):
        """None yet.

        Args:
            name: what the names of their programs begin with.
            options: what the user said about the batch.
            kept: how many programs of each are kept.
        """
        self._name, self._options, self._kept = name, options, kept
        self._numbers = itertools.count()
        self._made: weakref.WeakSet[DistributedFunction] = weakref.WeakSet()

    def make(
        self,
        function: Callable[..., Any],
        compile_program: Callable[[str, CapturedFunction], Program],
        *,
        batched: Collection[str] | None,
        own: Collection[str] = (),
    ) -> DistributedFunction:
        """A distributed step; for the arguments see its class."""
        step = DistributedFunction(
            function,
            compile_program,
            name=f"{self._name}-{next(self._numbers)}",
            options=self._options,
            batched=batched,
            own=own,
            kept=self._kept,
        )
        self._made.add(step)
        return step

    def clear(self) -> None:
        """Let go of the programs of all that are still used."""
        for step in self._made:
            step.clear()
        self._made.clear()
