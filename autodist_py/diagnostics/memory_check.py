"""`MemoryCheck`: refuses a step, before it begins, that computes a tensor of the whole batch which no memory holds.

Without it the system would end the process, and not say why. A program that gathers rows is asked for its first batch,
and for each later one with a larger size than any before. For all other batches it costs a look at shapes.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from operator import le

import tensorflow as tf
from rich.filesize import decimal

from autodist_py import tf_adapter
from autodist_py.cluster.launch.oom import memory_limit
from autodist_py.cluster.step_hook import StepHook
from autodist_py.kernel.analysis.whole_batch_sizes import WholeTensor, gathers_rows, whole_tensors
from autodist_py.kernel.pipeline import CompiledProgram
from autodist_py.kernel.topology import Topology, is_gpu
from autodist_py.proto.errors import CaptureError

_log = logging.getLogger(__name__)


def memory_of(device: str) -> int | None:
    """The bytes of memory that a TensorFlow device of this process may use in all; None: it is not known."""
    if is_gpu(device):
        return tf_adapter.memory_limit(device)
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return memory_limit()
    return min(physical, memory_limit() or physical)


def is_checked(program: CompiledProgram) -> bool:
    """Whether a program computes anything of the rows of a whole batch, which it is given in a call.

    Where workers take their steps by themselves, each has another batch than the one that it is given.
    """
    has_batch = program.consistency.is_bsp and any(source.batched for _, source in program.feeds)
    return has_batch and gathers_rows(program.item)


class MemoryCheck(StepHook):
    """Compares the tensors of one program that are computed of the whole batch with its devices' memory."""

    def __init__(self, program: CompiledProgram, name: str, *, batch: str, line_of: Callable[[str], str]):
        """Nothing is compared yet.

        Args:
            program: what is run.
            name: what it is called.
            batch: whether workers are given the same ("global"), or each its own part ("local").
            line_of: the user's line that has made an op, by its name; "": it is not known.
        """
        self._item, self._name, self._line_of = program.item, name, line_of
        self._inputs = [source.name for _, source in program.feeds]
        devices = [replica.device for replica in program.topology.local_replicas if replica.trains]
        self._sharing = Counter(device if is_gpu(device) else Topology.host for device in devices)
        self._num_replicas = program.topology.num_replicas
        is_apart = batch == "local" and len(program.topology.workers) > 1
        sharing_out = devices if is_apart else [one for one in program.topology.replicas if one.trains]
        self._parts = max(len(sharing_out), 1)
        self._least = "at least " if is_apart else ""
        self._seen: list[int] = []
        self._has_warned = False

    def before(self, step: int, feeds: Sequence[tf.Tensor]) -> None:
        """See StepHook.

        Raises:
            CaptureError: a tensor is larger than a device's memory.
        """
        shapes = [feed.shape.as_list() for feed in feeds]
        sizes = list(chain.from_iterable(shapes))
        if len(sizes) == len(self._seen) and all(map(le, sizes, self._seen)):
            return
        given = dict(zip(self._inputs, shapes, strict=True))
        for one in whole_tensors(self._item, given, replicas=self._parts)[:1]:
            for device, sharing in self._sharing.items():
                self._compare(one, device, sharing)
        self._seen = list(map(max, sizes, self._seen)) if len(sizes) == len(self._seen) else sizes

    def _compare(self, one: WholeTensor, device: str, sharing: int) -> None:
        memory = memory_of(device)
        if memory is None:
            return
        line = self._line_of(one.op)
        told = (
            f"{self._name}: {one.type} '{one.op}'{f' ({line})' if line else ''} is computed of rows of the whole batch "
            f"on each replica. For this batch it has the shape {list(one.shape)} of {one.dtype}, which is {self._least}"
            f"{decimal(one.nbytes)}"
        )
        has = f"the {'GPU' if is_gpu(device) else 'machine'} has {decimal(memory)} of memory"
        ways = "Use a smaller batch, or let each example meet fewer others, such as fewer negatives"
        if one.nbytes > memory:
            own = '. Or let each replica mix its own part of the batch: AutoDist(batch_statistics="replica")'
            apart = own if self._num_replicas > 1 else ""
            raise CaptureError(f"{told}, and {has}. {ways}{apart}")
        if sharing * one.nbytes > memory and not self._has_warned:
            self._has_warned = True
            _log.warning("%s. %d replicas of this process share the memory, and %s. %s", told, sharing, has, ways)
