"""`Mode`: what becomes of the steps that doors capture: they are compiled, and recorded for `autodist verify`.

It is chosen once, by the settings, in `mode_of`.
"""

from functools import partial

import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.function import CapturedFunction
from autodist_py.capture.doors.graph import GraphScope
from autodist_py.capture.recording.user_code import line_in
from autodist_py.config.settings import Settings
from autodist_py.diagnostics.one_device import OneDeviceStep
from autodist_py.diagnostics.recording import RecordedProgram, Recorder
from autodist_py.kernel.ir.dataflow import gradient_types, op_types
from autodist_py.program.build import CapturedStep, Compiler
from autodist_py.program.session_programs import DistributedPrograms, OneDevicePrograms, SessionPrograms
from autodist_py.program.step_function import Program


class Mode:
    """Steps are compiled for the cluster."""

    def __init__(self, compiler: Compiler, options: CaptureOptions):
        """By that compiler, as the options say."""
        self._compiler, self._options = compiler, options

    @property
    def looks_ahead(self) -> bool:
        """Whether what Keras is given is looked at before its steps."""
        return self._compiler.cluster.num_workers > 1

    def program(self, name: str, captured: CapturedFunction, *, together: bool) -> Program:
        """The program of a captured step function; `together`: all workers run it also where it trains nothing."""
        step = CapturedStep(
            item=captured.item,
            variables=captured.variables,
            state=captured.state,
            name=name,
            examples=captured.examples,
            own=captured.own,
            may_go=captured.is_plain,
            line_of=partial(line_in, captured.graph),
        )
        if not captured.item.gradients and not together:
            return self._compiler.alone(step)
        return self._compiler.distributed(step, self._compiler.strategy(captured.item, captured.examples))

    def session_programs(self, scope: GraphScope) -> SessionPrograms:
        """The programs of a session over a captured graph."""
        return DistributedPrograms(scope, self._compiler, self._options)


class Recorded(Mode):
    """Steps are compiled for the cluster, and what the first ones do is written to files."""

    looks_ahead = True

    def __init__(self, compiler: Compiler, options: CaptureOptions, recorder: Recorder):
        """The recorder writes."""
        super().__init__(compiler, options)
        self._recorder = recorder

    def program(self, name: str, captured: CapturedFunction, *, together: bool) -> Program:
        """See Mode."""
        program = self._program(name, captured, together=together)
        if not captured.item.gradients:
            return program
        return RecordedProgram(
            program,
            self._recorder,
            captured.item,
            lambda: captured.variables,
            num_results=captured.result.num_values,
            op_types=op_types(captured.item),
            computed_in=gradient_types(captured.item),
        )

    def _program(self, name: str, captured: CapturedFunction, *, together: bool) -> Program:
        return super().program(name, captured, together=together)

    def session_programs(self, scope: GraphScope) -> SessionPrograms:
        """See Mode."""
        return DistributedPrograms(scope, self._compiler, self._options, self._recorder)


class Plain(Recorded):
    """Steps are run on one device as TensorFlow does, and recorded: with these the others are compared."""

    def _program(self, name: str, captured: CapturedFunction, *, together: bool) -> Program:
        return OneDeviceStep(captured, any_size=together)  # A step of `fit`.

    def session_programs(self, scope: GraphScope) -> SessionPrograms:
        """See Mode."""
        return OneDevicePrograms(scope, self._options, self._recorder)


def mode_of(settings: Settings, compiler: Compiler, options: CaptureOptions) -> Mode:
    """What the settings ask for."""
    if settings.record_dir is None:
        return Mode(compiler, options)
    # On GPUs TensorFlow multiplies in TF32 otherwise, which rounds more than the comparison allows. The process records
    # and ends, so this holds for all of it.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    recorder = Recorder(settings.record_dir, rank=compiler.cluster.rank, steps=settings.record_steps)
    return (Plain if settings.recorded_run == "plain" else Recorded)(compiler, options, recorder)
