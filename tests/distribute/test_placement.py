"""Programs of one machine's replicas have a host, and their text is written where the environment says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from autodist_py.distribute import CentralStorageStrategy, MirroredStrategy, MultiWorkerMirroredStrategy
from autodist_py.distribute.placement import LocalPlacement, options_of
from autodist_py.kernel.pipeline import PASSES
from autodist_py.program.build import CapturedStep, Kernel
from autodist_py.proto.graph_item import Gradient, Input, Variable
from autodist_py.strategy_builders.all_reduce import AllReduce
from tests.support.kernel_programs import captured, handle, placeholder, raw


def test_replicas_on_gpus_alone_are_compiled() -> None:
    with tf.Graph().as_default() as graph:
        w = handle("w")
        gradient = raw.Identity(input=placeholder("x"), name="gradient/w")
        raw.AssignSubVariableOp(resource=w, value=gradient, name="update")
        item = captured(
            graph,
            variables=[Variable("w", "float64", (), update_ops=("update",))],
            gradients=[Gradient("w", ("gradient/w:0",), "add")],
            inputs=[Input("x", "float64", (), batched=False, kind="part")],
            run_ops=["update"],
        )
    kernel = Kernel(options_of(decorrelate=False))
    placement = LocalPlacement(["/device:GPU:0", "/device:GPU:1"], AllReduce(), kernel)
    step = CapturedStep(item=item, variables={}, name="step")
    assert {bound.replica for bound in placement.compiled(step).program.variables} == {0, 1}


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: MirroredStrategy(["CPU:0"]), "mirrored"),
        (lambda: CentralStorageStrategy(["CPU:0"]), "central-storage"),
        (MultiWorkerMirroredStrategy, "multi-worker-mirrored"),
    ],
)
def test_a_folder_gets_the_program_after_each_pass(
    made: Callable[[], Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTODIST_DUMP_DIR", str(tmp_path))
    strategy = made()

    def total() -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([]))

    tf.function(lambda: strategy.run(total), autograph=False)()
    written = tmp_path.glob(f"{name}-*/worker-0/*.txt")
    assert {path.stem.split("-", 2)[2] for path in written} >= {one.name for one in PASSES}
