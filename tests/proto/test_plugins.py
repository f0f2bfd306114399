"""Names of plug-ins: aliases, names that a module passes on, and kinds of synchronizers that somebody adds."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.kernel.pipeline import compile
from autodist_py.proto.compressors import Compressor, HorovodCompressor, NoneCompressor, compressor_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient, GraphItem, Variable
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, Consistency, PSSynchronizer, Synchronizer
from autodist_py.strategy_builders.base import build_strategy, resolve_builder
from tests.support import kernel_programs

ROOT = Path(__file__).resolve().parents[2]

_PACKAGE = {
    "its_own.py": """
import math
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True, slots=True)
class Own:
    passes_through: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    sums_first: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = False
    codes_rows: ClassVar[bool] = True
    gives_up: ClassVar[str] = ""

    times: int = 1

    def travels_as(self, dtype):
        return dtype

    def wire_bytes(self, shape, item):
        return math.prod(shape) * item
""",
    "passing_on.py": "from its_own import Own\n",
    "some_compressor-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: some-compressor\nVersion: 1.0\n",
    "some_compressor-1.0.dist-info/entry_points.txt": "[autodist_py.compressors]\nShort = passing_on:Own\n",
}
_SAID = """
from autodist_py.proto.compressors import compressor_of, text_of
{first}
{second}
given = compressor_of("Short(times=3)", "it")
same = its_own.Own(times=3)
print(text_of(same), text_of(given), given == same, compressor_of("its_own:Own(times=3)", "it") == given)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An installed package whose compressor is registered under a name of another module, which passes it on."""
    for name, text in _PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("order", [("its_own", "passing_on"), ("passing_on", "its_own")])
@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_compressor_has_one_name_whatever_is_imported_first(package, order, seed):
    first, second = (f"import {name}" for name in order)
    done = subprocess.run(
        [sys.executable, "-c", _SAID.format(first=first, second=second)],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}{os.pathsep}{package}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Short(times=3) Short(times=3) True True\n"


def test_a_class_in_the_place_of_a_value_is_refused_with_the_way_out():
    with pytest.raises(StrategyError) as raised:
        AllReduceSynchronizer(compressor=HorovodCompressor)  # type: ignore[arg-type]
    assert str(raised.value) == (
        "compressor of an AllReduce synchronizer: a compressor is a value; got the class HorovodCompressor; write "
        "HorovodCompressor()"
    )
    assert compressor_of(HorovodCompressor(), "it") == HorovodCompressor()


# -- A third kind of synchronizer -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rounded:
    """A kind of somebody's own: small gradients are summed as they are, others in half precision."""

    small: bool = False
    group: int = 0

    @property
    def compressor(self) -> Compressor:
        return NoneCompressor() if self.small else HorovodCompressor()

    @property
    def consistency(self) -> Consistency:
        return Consistency()

    @property
    def servers(self) -> tuple[str, ...]:
        return ()

    @property
    def timeout_seconds(self) -> float:
        return 0.0

    @property
    def as_all_reduce(self) -> AllReduceSynchronizer:
        return AllReduceSynchronizer(compressor=self.compressor, group=self.group)

    @property
    def as_ps(self) -> PSSynchronizer | None:
        return None

    def with_groups_from(self, first: int) -> "Rounded":
        return replace(self, group=first + self.group)

    def losses(self, workers: int) -> Iterator[str]:
        return self.as_all_reduce.losses(workers)

    def to_proto(self):
        return self.as_all_reduce.to_proto()


@dataclass(frozen=True, slots=True)
class RoundLarge:
    """A builder of somebody's own, of that kind."""

    most: int = 64

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        nodes = (VariableStrategy(one.name, Rounded(one.nbytes <= self.most)) for one in item.trainable_variables)
        return Strategy(tuple(nodes), resources.replica_devices)


def test_a_third_kind_of_synchronizer_is_what_it_is_lowered_to():
    two_nodes = local_resource_spec(2)
    item = GraphItem(
        b"",
        (Variable("large", "float32", (8, 4)), Variable("small", "float32", (4,))),
        (Gradient("large", ("large_gradient:0",)), Gradient("small", ("small_gradient:0",))),
    )
    assert isinstance(Rounded(), Synchronizer)
    strategy = build_strategy(resolve_builder(f"{__name__}:RoundLarge(most=16)"), item, two_nodes)
    sent = Strategy.from_proto(strategy.to_proto(), is_own=True)  # What the other workers are told.
    plain = [AllReduceSynchronizer(compressor="HorovodCompressor"), AllReduceSynchronizer()]
    assert [node.synchronizer for node in sent.node_config] == plain
    assert [node.synchronizer and node.synchronizer.as_all_reduce for node in strategy.node_config] == plain
    assert "half precision" in strategy.given_up


def test_a_third_kind_of_synchronizer_is_lowered_as_the_one_that_it_names():
    item, where = kernel_programs.two_stages(), kernel_programs.topology(2, 1)
    compiled = {}
    for kind in (Rounded(), AllReduceSynchronizer(compressor="HorovodCompressor")):
        strategy = Strategy(tuple(VariableStrategy(one.name, kind) for one in item.variables), ("127.0.0.1:CPU:0",))
        program = compile(item, strategy, where)
        compiled[type(kind)] = program.graph.graph_def().SerializeToString(deterministic=True), str(program.schedule)
    assert compiled[Rounded] == compiled[AllReduceSynchronizer]
