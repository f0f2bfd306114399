"""A pass of your own: each step prints how many bytes this worker gives to collectives.

Ways to run it:

    autodist run --local 2 examples/count_bytes.py
"""

import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.fragment import TensorSpec, trace
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.runner import Contract


@dataclass(frozen=True, slots=True)
class CountBytes:
    """Each step prints how many bytes this worker gives to collectives.

    Attributes:
        text: what is printed before the number.
    """

    name: ClassVar[str] = "count-bytes"
    after: ClassVar[str] = "lower-exchanges"
    contract: ClassVar[Contract] = Contract(requires={Invariant.REDUCED})

    text: str = "bytes of this step:"

    def __call__(self, program: Program) -> Program:
        """The program with one op more, which it runs each step."""
        nodes = [program.graph.nodes[op] for one in program.lowered.collectives for op in one.ops]
        if not nodes:
            return program
        given = [TensorSpec(node.input[0], tf.as_dtype(node.attr["T"].type)) for node in nodes]

        def count(tensors: list[tf.Tensor]) -> tf.Operation:
            with tf.device(program.topology.host):
                sizes = [tf.size(tensor, tf.int64) * tensor.dtype.size for tensor in tensors]
                return tf.print(self.text, tf.add_n(sizes), output_stream=sys.stdout)

        fragment = trace(count, [given], scope="AutoDist/CountBytes")
        edits = Edits()
        edits.add(fragment.nodes)
        run_ops = (*program.run_ops, fragment.outputs)
        return replace(program, graph=edits.apply(program.graph), run_ops=run_ops)


def main() -> None:
    autodist = AutoDist(passes=[CountBytes()])
    weight = tf.Variable(np.zeros([3, 2]), name="weight")

    @autodist.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    for _ in range(2):
        step(np.ones([6, 3]))
    autodist.close()


if __name__ == "__main__":
    main()
