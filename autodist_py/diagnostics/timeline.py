"""A few steps as they ran on all workers, op by op, in Chrome's trace format: what overlaps what is seen there."""

import json
import logging
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.cluster.cluster import Cluster
from autodist_py.cluster.exit_hooks import is_failing
from autodist_py.cluster.exit_stack import Ending, at_exit
from autodist_py.cluster.step_hook import StepHook
from autodist_py.kernel.collectives.engines import slowest_bandwidth
from autodist_py.kernel.events import Collective
from autodist_py.proto.wire import write_atomically

_log = logging.getLogger(__name__)

FIRST_STEP = 3
"""The steps before have more to do: they make programs, and buffers."""
STEPS = 3

_OP = re.compile(r"([A-Za-z0-9.][^:]*):(_?[A-Z]\w*)")
"""What an op's event is called: its name and type. Others are of TensorFlow's own parts, as `Part::does`."""


class Timeline:
    """Traces the steps from `FIRST_STEP` on of this process, with TensorFlow's profiler; the chief writes the file.

    In the file a process is a worker, with its threads; an event is an op, or a collective by the words for what it
    combines, which Horovod's are not: the profiler does not see them. Times are of each worker's own clock.
    """

    def __init__(self, path: Path, cluster: Cluster, *, key: str, pause: Callable[[], None]):
        """Nothing is traced yet.

        Args:
            path: the file to write.
            cluster: the workers; each makes a Timeline.
            key: for what they tell the chief.
            pause: is called before this worker waits for all others.
        """
        self._path, self._cluster, self._key, self._pause = path, cluster, key, pause
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._is_begun = False
        self._is_done = False
        self._forget_exit = at_exit(Ending.TIMELINE, self.close)

    def hook(self, collectives: Sequence[Collective]) -> StepHook:
        """What traces the steps of a program of these collectives."""
        return _TracedSteps(self, {op: one for one in collectives for op in one.ops})

    def before_step(self) -> None:
        """The next step begins."""
        if self._cluster.step != FIRST_STEP:
            return
        self._is_begun = True
        try:
            folder = tempfile.TemporaryDirectory(prefix="autodist-timeline-")
        except OSError as error:
            _log.warning("there is no timeline of this worker: no folder for it can be made: %s", error)
            return
        try:
            tf.profiler.experimental.start(folder.name)
        except tf.errors.AlreadyExistsError:
            folder.cleanup()
            _log.warning(
                "there is no timeline of this worker: another profiler runs in its process, such as TensorBoard's with "
                "profile_batch. Leave one of the two out"
            )
            return
        self._folder = folder

    def after_step(self, collectives: Mapping[str, Collective]) -> None:
        """A step has ended, whose collectives are these, by their ops."""
        if not self._is_begun or self._is_done or self._cluster.step < FIRST_STEP + STEPS - 1:
            return
        events = self._events(collectives)
        self._pause()
        everyone = self._cluster.compare(self._key, zlib.compress(json.dumps(events).encode()))
        self._is_done = True
        if self._cluster.is_chief:
            parts = {rank: json.loads(zlib.decompress(value)) for rank, value in everyone.items()}
            about = {
                "steps": self._cluster.step - FIRST_STEP + 1,
                "workers": self._cluster.num_workers,
                "bits_per_second": slowest_bandwidth(self._cluster.resources),
                "has_horovod": any(one.by_name for one in collectives.values()),
            }
            content = {"traceEvents": list(_merged(parts)), "displayTimeUnit": "ms", "otherData": about}
            self._write(json.dumps(content).encode())
        self._cluster.barrier(f"{self._key}/written")  # Else the others' next step, and its limit, begin meanwhile.

    def _write(self, content: bytes) -> None:
        """The file is written, whole; or a warning says why it is as it was, and training goes on."""
        try:
            write_atomically(self._path, content)
        except OSError as error:
            _log.warning("the timeline is not in %s: %d bytes, %s", self._path, len(content), error)
        else:
            _log.info("the timeline of steps %d to %d is in %s", FIRST_STEP, self._cluster.step, self._path)

    def _events(self, collectives: Mapping[str, Collective]) -> list[dict[str, Any]]:
        """What has been traced; nothing is any more."""
        folder = self._stop(save=True)
        if folder is None:
            return []
        with folder:
            return list(_events(Path(folder.name), collectives))

    def _stop(self, *, save: bool) -> tempfile.TemporaryDirectory[str] | None:
        """Nothing is traced any more. The folder for what was, if anything: it is there with `save`."""
        if self._folder is None:
            return None
        folder, self._folder = self._folder, None
        try:
            tf.profiler.experimental.stop(save=save)
        except tf.errors.UnavailableError:
            _log.warning("there is no timeline of this worker: another ended the profiler of its process")
        except tf.errors.OpError as error:
            _log.warning("there is no timeline of this worker: its events cannot be written: %s", error.message)
            folder.cleanup()
            return None
        return folder

    def close(self) -> None:
        """The AutoDist is closed, or the script ends without that; say so if there were too few steps."""
        self._forget_exit()
        folder = self._stop(save=False)
        if folder is not None:
            folder.cleanup()
        if self._cluster.is_chief and not self._is_done and self._cluster.step < FIRST_STEP + STEPS:
            is_failed = is_failing() or self._cluster.failure(wait=0.0) is not None
            _log.warning(
                "there is no timeline in %s: it is of the steps %d to %d, and the run had %d%s",
                self._path,
                FIRST_STEP,
                FIRST_STEP + STEPS - 1,
                self._cluster.step,
                " when it failed" if is_failed else ". Train for more",
            )


class _TracedSteps(StepHook):
    def __init__(self, timeline: Timeline, collectives: Mapping[str, Collective]):
        self._timeline, self._collectives = timeline, collectives

    def before(self, step: int, feeds: Sequence[tf.Tensor]) -> None:
        """See StepHook."""
        self._timeline.before_step()

    def after(self, step: int) -> None:
        """See StepHook."""
        self._timeline.after_step(self._collectives)


def _events(folder: Path, collectives: Mapping[str, Collective]) -> Iterator[dict[str, Any]]:
    """The ops that the profiler has seen, as complete events with a thread's number; times in microseconds."""
    for found in sorted(folder.rglob("*.xplane.pb")):
        yield from _events_of(found.read_bytes(), collectives)


def _events_of(space: bytes, collectives: Mapping[str, Collective]) -> Iterator[dict[str, Any]]:
    for event in tf_adapter.profiled(space):
        match = _OP.fullmatch(event.name)
        if match is None:
            continue
        op, kind = match.groups()
        one = collectives.get(op)
        yield {
            "ph": "X",
            "name": kind if one is None else one.what,
            "cat": "op" if one is None else "collective",
            "tid": event.thread,
            "ts": event.start_us,
            "dur": event.duration_us,
            "args": {"op": op, "type": kind} | ({} if one is None else {"bytes": one.nbytes}),
        }


def _merged(parts: Mapping[int, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The workers' events, each worker a process, with its threads numbered in the order of their first events."""
    for rank, events in sorted(parts.items()):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"worker {rank}"}}
        threads: dict[int, int] = {}
        for event in sorted(events, key=lambda event: float(event["ts"])):
            number = threads.setdefault(event["tid"], len(threads))
            yield {**event, "pid": rank, "tid": number}
