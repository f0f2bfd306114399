"""`StepCapture`: a step function captured for what a call gives it, and, if it is captured again, as it was before."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.batch.looked_up import looked_up
from autodist_py.capture.doors.function import CapturedFunction, capture_function, step_signature
from autodist_py.capture.doors.retraced import Trace
from autodist_py.capture.recording.user_code import line_of
from autodist_py.config.settings import KEPT_PROGRAMS_VARIABLE
from autodist_py.program.calls import Call, Calls, is_plain
from autodist_py.proto.errors import CaptureError


class StepCapture:
    """How one step function is captured.

    Attributes:
        calls: takes the function's calls apart.
        options: what the user said about the batch.
        batched: the names of the arguments that are batched; None: the user has not said.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        title: str,
        options: CaptureOptions,
        *,
        batched: Collection[str] | None,
        own: Collection[str] = (),
    ):
        """Nothing is captured yet.

        Args:
            function: a step of one device.
            title: its name, for messages.
            options: what the user said about the batch.
            batched: see `AutoDist.function`.
            own: names of the arguments that each worker has of its own, though the batch is the same for all.
        """
        are_parts = options.batch == "local" and options.num_workers > 1
        self.calls = Calls(title, step_signature(function), batched, are_parts=are_parts)
        self.options, self.batched = options, batched
        self._function, self._title, self._own = function, title, frozenset(own)
        self._let_go: dict[tuple[Any, ...], Trace] = {}
        """What is remembered of programs that were let go."""

    def captured(self, call: Call) -> CapturedFunction:
        """The step as it is captured for the call.

        Raises:
            CaptureError: it cannot be captured, or shares out what is no batch.
        """
        captured = capture_function(self._function, self.calls.arguments(call), call.structure, self.options)
        if self.batched is None and self.options.num_replicas > 1:
            self._require_no_table(call, captured)
        fed = (source.name for source in captured.item.inputs if source.kind == "feed")
        named = zip(self.calls.parameters(call), fed, strict=True)
        own = frozenset(fed_as for parameter, fed_as in named if parameter in self._own)
        return replace(captured, examples=call.examples, own=own, is_plain=is_plain(call.structure))

    def captured_as_before(self, call: Call, *, most: int) -> CapturedFunction:
        """The step as it is captured now, which is as it was when its program was let go, if one was.

        Raises:
            CaptureError: it is another; on one device it would still be what it was. At most `most` programs are kept.
        """
        captured = self.captured(call)
        before = self._let_go.get(call.key)
        other = "" if before is None else before.other_than(captured)
        if other:
            raise CaptureError(
                f"'{self._title}' was traced again, as the program of this signature was let go, and {other} is "
                "another than before. Do not let a step depend on Python values that change, but on arguments or "
                f"variables; or set {KEPT_PROGRAMS_VARIABLE}, now {most}, to as many signatures as there are"
            )
        return captured

    def remember(self, key: tuple[Any, ...], captured: CapturedFunction) -> None:
        """The program of that signature is let go: captured again, the step is to be the same."""
        self._let_go[key] = Trace.of(captured)

    def clear(self) -> None:
        """Let go of what is remembered."""
        self._let_go.clear()
        self.calls.clear()

    def _require_no_table(self, call: Call, captured: CapturedFunction) -> None:
        """Refuse to share out what the step looks up in by labels, though it has the batch's number of elements."""
        for found in looked_up(captured.item):
            line = "" if captured.graph is None else line_of(captured.graph.get_operation_by_name(found.op))
            others = self.calls.batched_beside(call, found.table)
            raise CaptureError(
                f"'{self._title}' looks up elements of '{found.table}' by those of '{found.labels}'"
                f"{f' ({line})' if line else ''}, as weights of classes are. '{found.table}' has as many elements as "
                "the batch has examples, so each replica would be given a part of it. Name the arguments that are "
                f"batches: autodist.function(batched={others})"
            )
