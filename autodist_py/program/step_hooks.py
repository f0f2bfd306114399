"""`StepHooks`: what surrounds each step of all workers, in its order."""

import logging
from collections.abc import Callable, Collection, Iterator

from autodist_py.cluster.cluster import Cluster
from autodist_py.cluster.input_check import InputCheck
from autodist_py.cluster.step_hook import StepHook
from autodist_py.diagnostics.step_times import StepTimes
from autodist_py.diagnostics.timeline import Timeline
from autodist_py.kernel.ir.dataflow import PYTHON_OPS, using
from autodist_py.kernel.ir.graph import ITERATOR_NEXT
from autodist_py.kernel.pipeline import CompiledProgram
from autodist_py.program.together import Together
from autodist_py.servers.loops import Messages
from autodist_py.servers.parameter_servers import OpenMessages, RemoteVariables

_log = logging.getLogger(__name__)


class StepHooks:
    """Makes the hooks of one AutoDist object's programs.

    Attributes:
        added: the user's own, of all programs; they are called within the others.
    """

    def __init__(self, cluster: Cluster, *, checked_steps: int = 0, timeline: Timeline | None = None):
        """The inputs of a program's first `checked_steps` steps are compared, and steps traced by a `timeline`."""
        self.added: list[StepHook] = []
        self._cluster, self._checked_steps, self._timeline = cluster, checked_steps, timeline

    def of(
        self,
        program: CompiledProgram,
        name: str,
        *,
        timeout: float,
        key: str,
        own: Collection[str],
        messages: Messages | None,
        variables: RemoteVariables,
    ) -> tuple[StepHook, ...]:
        """Those of a program, the first outermost.

        Args:
            program: what all workers run.
            name: what it is called.
            timeout: for how many seconds a step waits for other workers; 0: as long as their heartbeats come.
            key: for what the workers compare of its inputs.
            own: names of inputs that are each worker's own, and not compared.
            messages: what it exchanges with servers.
            variables: its variables that live elsewhere.
        """
        is_bsp = program.consistency.is_bsp
        fed = [source.name for source in program.item.inputs if source.kind == "feed"]
        return (
            *([OpenMessages(self._cluster, messages, variables)] if messages else ()),
            Together(self._cluster, program.collectives, timeout),
            InputCheck(self._cluster, key, fed, own=own, steps=self._checked_steps if is_bsp else 0),
            *([self._timeline.hook(program.collectives)] if self._timeline and is_bsp else ()),
            variables,
            *([StepTimes(self._cluster.num_workers, _saying(name))] if self._is_measured(program) else ()),
        )

    def otherwise(self, program: CompiledProgram) -> Iterator[str]:
        """What of the program's steps cannot be shown as it was asked for, in sentences for the user."""
        if self._timeline is None:
            return
        if not program.consistency.is_bsp:
            yield "a timeline is of steps that workers take together; there is none of this program"
        if any(one.by_name for one in program.collectives):
            yield (
                "TensorFlow's profiler does not see Horovod's all-reduces, so the timeline is without them; RING's are "
                "there, with all_reduce_spec RING"
            )

    def close(self) -> None:
        """No step is traced any more."""
        if self._timeline is not None:
            self._timeline.close()

    def _is_measured(self, program: CompiledProgram) -> bool:
        """Whether the times of the chief's steps tell what one device would take."""
        if not self._cluster.is_chief or self._cluster.num_workers == 1 or self._timeline is not None:
            return False
        if using(program.graph, ITERATOR_NEXT | PYTHON_OPS):
            return False  # It waits for its input, too, as one device would.
        return program.consistency.is_bsp and bool(program.item.gradients)


def _saying(name: str) -> Callable[[str], None]:
    return lambda line: _log.warning("%s: %s", name, line)
