"""Synchronize: what stands between each raw gradient and the update that reads it."""

from dataclasses import dataclass, replace
from typing import ClassVar

from autodist_py.kernel.cross_device_ops.collective import Collectives
from autodist_py.kernel.memory import Recorder
from autodist_py.kernel.names import on_replica, op_of
from autodist_py.kernel.passes.launches import with_launches
from autodist_py.kernel.program import Program
from autodist_py.kernel.rewrite import Edits
from autodist_py.kernel.synchronizers import all_reduce
from autodist_py.kernel.synchronizers.grouping import groups


@dataclass(frozen=True, slots=True)
class Synchronize:
    """Every gradient of a variable that lives on the workers is combined over all replicas before anything reads it.

    Requires: a replicated graph in which each recorded gradient's tensors are the results of ops of their own
        (`Identity`: capture makes them), so that all that reads a gradient reads it there.
    Ensures: those ops pass on the combined gradient, as far as its compressor keeps it: the sum over replicas, each
        weighted by its share of the examples (loss "mean"), or plain ("sum"). Clipping, schedules and the update, which
        read them, are as on one device. Outputs that have travelled with gradients are combined, too.
    """

    name: ClassVar[str] = "synchronize"

    def __call__(self, program: Program) -> Program:
        if program.is_single:
            return program
        view = program.graph
        outputs: dict[str, str] = {}
        edits = Edits()
        for group in groups(program):
            collectives, recorder = Collectives(program.place, program.next_instance_key), Recorder()
            fragment = all_reduce.combine(program, group, view, collectives, recorder)
            edits.add(fragment.nodes)
            count = len(group.gradients)
            for gradient, copies in zip(group.gradients, fragment.outputs[:count], strict=True):
                for replica, tensors in enumerate(copies):
                    for seam, tensor in zip(gradient.tensors, tensors, strict=True):
                        edits.set_input(on_replica(replica, op_of(seam)), 0, tensor)
            for output, copies in zip(group.outputs, fragment.outputs[count:], strict=True):
                outputs[output.tensor] = copies[0][0]
            program = with_launches(program, collectives, rank=group.rank(program), what=str(group))
            program = replace(
                program,
                memories=(*program.memories, *recorder.memories),
                run_ops=(*program.run_ops, *recorder.writers),
            )
        fetched = zip(program.item.outputs, program.fetches, strict=True)
        fetches = tuple(outputs.get(output.tensor, fetch) for output, fetch in fetched)
        return replace(program, graph=edits.apply(view), fetches=fetches, combined=frozenset(outputs))
