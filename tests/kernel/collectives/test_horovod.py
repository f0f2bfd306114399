"""The graph of all-reduces by Horovod, and with which Horovod, or for which gradients, there is none."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow as tf

from autodist_py.kernel.collectives import horovod_adapter
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.verify import verify
from autodist_py.proto.errors import InvalidGraphError, StrategyError
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from tests.support import kernel_programs
from tests.support.by_horovod import is_installed
from tests.support.packed import in_packs, three_layers


def ordered(strategy: Strategy | None = None) -> Program:
    """A program of dense and sparse gradients for two workers, in order."""
    item = kernel_programs.dense_and_sparse()
    by_horovod = kernel_programs.all_reduce(item, spec="HOROVOD", chunk_size=1)
    return kernel_programs.after("order", item, kernel_programs.topology(1, 1), strategy or by_horovod)


@is_installed
def test_dense_gradients_travel_by_horovod_and_the_rest_as_ever() -> None:
    program = ordered()
    ops = {one.what: program.graph.nodes[op].op for one in program.lowered.collectives for op in one.ops}
    assert {op for what, op in ops.items() if what.startswith("dense gradients")} == {"HorovodAllreduce"}
    assert {op for what, op in ops.items() if not what.startswith("dense gradients")} == {"CollectiveGatherV2"}


@is_installed
def test_a_gradient_that_is_larger_than_a_buffer_travels_whole() -> None:
    item = three_layers(side=200)
    program = kernel_programs.after(
        "order", item, kernel_programs.topology(1, 1), in_packs(item, bytes_per_pack=8, spec="HOROVOD")
    )
    by_name = [(one.what, len(one.ops)) for one in program.lowered.collectives if one.by_name]
    assert by_name == [(f"dense gradients of w{index}", 1) for index in (2, 1, 0)]


@is_installed
def test_workers_find_each_others_parts_by_names_that_are_equal_and_of_one_program() -> None:
    item = kernel_programs.two_stages(stages=3)
    strategy = kernel_programs.all_reduce(item, spec="HOROVOD", chunk_size=1)

    def names(worker: int, first_instance_key: int) -> list[str]:
        topology = kernel_programs.topology(2, 1, 3, worker=worker)
        program = kernel_programs.after("order", item, topology, strategy, first_instance_key=first_instance_key)
        return [op for one in program.lowered.collectives if one.by_name for op in one.ops]

    assert names(0, 1) == names(1, 1) == names(2, 1)
    assert len(set(names(0, 1))) == 3
    assert not set(names(0, 1)) & set(names(0, 40))


@is_installed
def test_its_all_reduces_wait_for_no_other_collective_and_are_run_whatever_needs_them() -> None:
    program = ordered()
    assert Invariant.ORDERED in program.holds
    named = {op for one in program.lowered.collectives if one.by_name for op in one.ops}
    collectives = {op for one in program.lowered.collectives for op in one.ops}
    assert named
    assert named < collectives
    for op in named:
        assert not {f"^{other}" for other in collectives} & set(program.graph.nodes[op].input)
    assert named <= set(program.run_ops)
    with pytest.raises(InvalidGraphError, match=r"is not among the ops to run"):
        verify(replace(program, run_ops=tuple(set(program.run_ops) - named)))


# -- Refusals ----------------------------------------------------------------------------------------------------------

WAY_OUT = r".*; build it for this TensorFlow \(`make horovod` in the project's folder\), or use .* AUTO or RING"


def test_a_strategy_that_asks_for_it_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(StrategyError, match=r"HOROVOD needs Horovod, which is not installed" + WAY_OUT):
        ordered()


def test_a_strategy_that_asks_for_one_of_another_tensorflow_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    for metadata, found in (('{"tensorflow": "2.4.0"}', "2.4.0"), ("{}", "none")):
        (tmp_path / "horovod" / "metadata.json").write_text(metadata)
        words = rf"built for this TensorFlow. Received: one for TensorFlow {found}, beside TensorFlow {tf.__version__}"
        with pytest.raises(StrategyError, match=words + WAY_OUT):
            ordered()
    (tmp_path / "horovod" / "metadata.json").unlink()
    with pytest.raises(StrategyError, match="Received: one for TensorFlow none"):
        ordered()


@pytest.mark.parametrize("metadata", ["{", "[]"])
def test_one_whose_metadata_cannot_be_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, metadata: str
) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "metadata.json").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    with pytest.raises(StrategyError, match=r"whose metadata.json cannot be read: .*" + WAY_OUT):
        horovod_adapter.library()


@pytest.mark.parametrize("error", ["OSError('no such symbol')", "AttributeError('no such symbol')"])
def test_one_that_cannot_be_loaded_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str) -> None:
    (tmp_path / "horovod" / "tensorflow").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "tensorflow" / "__init__.py").write_text(f"raise {error}")
    (tmp_path / "horovod" / "metadata.json").write_text(f'{{"tensorflow": "{tf.__version__}"}}')
    monkeypatch.syspath_prepend(tmp_path)
    for name in {"horovod", *(name for name in sys.modules if name.partition(".")[0] == "horovod")}:
        monkeypatch.setitem(sys.modules, name, None)  # So that it is afterwards as before, also where it is not there.
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(StrategyError, match="cannot be loaded: no such symbol" + WAY_OUT):
        horovod_adapter.library()


@pytest.mark.parametrize("compressor", ["HorovodCompressor(dtype='bfloat16')", "examples.plugin.brief:Brief"])
def test_what_it_does_not_carry_is_refused_by_the_variables_name(compressor: str) -> None:
    synchronizer = AllReduceSynchronizer("HOROVOD", compressor)
    names = ("a", "b", "half", "table")
    strategy = Strategy(tuple(VariableStrategy(name, synchronizer) for name in names), ("127.0.0.1:CPU:0",))
    words = r"variable 'a': its gradient travels as bfloat16, which Horovod does not carry; it carries float16, float32"
    with pytest.raises(StrategyError, match=words):
        ordered(strategy)
