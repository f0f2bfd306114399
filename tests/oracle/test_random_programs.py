"""Random programs, compiled and compared with one device. `make fuzz` runs many more."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support import random_programs
from tests.support.cluster_pool import SHAPES, TWO_REPLICAS, TWO_WORKERS, Cluster, same_on_all_workers
from tests.support.random_parts import BUILDERS, LOSSES, OPERATIONS, RESULTS, SERVING, UPDATES, Writes
from tests.support.random_programs import SIZES, SOURCES, Operation, RandomProgram

pytestmark = [pytest.mark.first, pytest.mark.turns(1)]

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "231"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
ENOUGH = 100
"""Of fewer programs, those that are refused on every cluster are no share: one of 20 may be."""

operations = st.builds(
    Operation, st.sampled_from(sorted(OPERATIONS)), st.integers(0, 8), st.integers(0, 8), st.integers(0, 9)
)


def programs(builders: Sequence[str]) -> st.SearchStrategy[RandomProgram]:
    """Programs that one of these builders distributes."""
    return st.builds(
        RandomProgram,
        st.lists(operations, min_size=1, max_size=12).map(tuple),
        loss=st.sampled_from(sorted(LOSSES)),
        second_loss=st.sampled_from(["", "", *sorted(LOSSES)]),
        order=st.sampled_from(["together", "together", "in turn"]),
        update=st.sampled_from(sorted(UPDATES)),
        write=st.sampled_from(Writes.KINDS),
        builder=st.sampled_from(builders),
        sizes=st.integers(0, len(SIZES) - 1),
        source=st.sampled_from(["arguments", "arguments", *SOURCES]),
        result=st.sampled_from(sorted(RESULTS)),
        in_turn_with=st.sampled_from([*[""] * 8, "AllReduce"]),
        batch_statistics=st.sampled_from(["replica", "global"]),
    )


def fixed(*drawn: Operation, **parts: Any) -> RandomProgram:
    """A program of these operations, and the simplest of all else."""
    simplest = RandomProgram(
        drawn,
        "mean",
        "",
        "together",
        "descend",
        "nothing",
        "AllReduce",
        0,
        "arguments",
        "float",
        in_turn_with="",
        batch_statistics="replica",
    )
    return replace(simplest, **parts)


TRAINED = (Operation("multiply", 5, 7, 0), Operation("square", 2, 2, 0))
"""Other rows times the scale, and squares of the labelled ones, by the kernel."""
FIXED = {
    "rows by position": fixed(Operation("matmul_turned", 0, 2, 0), update="adagrad"),
    "rows by position, some twice": fixed(Operation("matmul_turned", 0, 4, 0), update="adam unclipped"),
    "an iterator": fixed(*TRAINED, source="iterator"),
    "two iterators": fixed(*TRAINED, second_loss="mean", source="two iterators"),
    "other numbers of rows": fixed(*TRAINED, second_loss="sum", source="zipped"),
    "arguments of two sizes": fixed(*TRAINED, second_loss="mean", source="arguments of two sizes"),
    "one loss after the other": fixed(*TRAINED, second_loss="sum", order="in turn", write="between"),
    "two AutoDist objects": fixed(*TRAINED, write="metric", result="long", in_turn_with="AllReduce"),
}
SERVED = {
    "on servers": fixed(*TRAINED, second_loss="mean", builder="PS"),
    "a later loss of no examples": fixed(
        *(Operation(name, position, 0, 0) for name, position in (("add", 0), ("tanh", 5), ("add", 0))),
        loss="each",
        second_loss="each",
        order="in turn",
        update="adagrad",
        builder="PS",
    ),
    "a chain": fixed(*TRAINED, second_loss="mean", order="in turn", builder=SERVING[-1], update="clip together"),
}
"""Programs of each shape, which are equal whatever is drawn."""
THREES = fixed(Operation("add", 0, 0, 0), Operation("reshape", 2, 0, 2), loss="each", update="adagrad", sizes=2)
"""It reshapes three rows of two numbers to two rows of three, of which no replica has as many."""


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """It says whether a program that was refused on another cluster is refused for what it is."""
    started = Cluster(TWO_REPLICAS, tmp_path_factory.mktemp("one-worker"))
    yield started
    started.close()


def _outcome(results: list[str]) -> str:
    """What a program did on all workers.

    One that trains nothing each worker runs by itself, so one of several devices may refuse what another runs.
    """
    refused = [one for one in results if one.startswith("refused")]
    others = [one for one in results if one not in refused]
    outcomes = [str(same_on_all_workers(alike)) for alike in (refused, others) if alike]
    return outcomes[0]


@pytest.mark.on(len(SHAPES))
@pytest.mark.timeout(1800 if EXAMPLES < 1000 else 6 * 3600)
@pytest.mark.parametrize("cluster", SHAPES, ids=lambda shape: shape.name, indirect=True, scope="module")
def test_random_programs_do_what_one_device_does(cluster: Cluster, one_worker: Cluster) -> None:
    outcomes: Counter[str] = Counter()

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES if cluster.shape is TWO_REPLICAS else EXAMPLES // 10,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(programs(BUILDERS if cluster.shape.num_workers == 1 else (*BUILDERS, *SERVING)))
    def trial(program: RandomProgram) -> None:
        outcome = _outcome(cluster.run(random_programs.run, program=program))
        outcomes[outcome.partition(":")[0]] += 1
        if outcome.startswith("refused"):
            assert one_worker.run(random_programs.run, program=program) == [outcome], "it is refused on this cluster"

    trial()
    print(dict(outcomes))
    tried = outcomes.total() - sum(outcomes[one] for one in outcomes if one.startswith("invalid")) - outcomes["mixes"]
    if tried >= ENOUGH:
        assert outcomes["refused"] <= 0.05 * tried, outcomes
        assert outcomes["not for this builder"] <= 0.05 * tried, outcomes
        assert outcomes["invalid on a part"] <= 0.05 * tried, outcomes
    assert outcomes["equal"] >= 0.4 * tried, outcomes


@pytest.mark.parametrize("cluster", [TWO_REPLICAS, TWO_WORKERS], ids=lambda shape: shape.name, indirect=True)
def test_a_program_of_each_shape_does_what_one_device_does(cluster: Cluster) -> None:
    programs = FIXED if cluster.shape is TWO_REPLICAS else FIXED | SERVED
    for name, program in programs.items():
        assert same_on_all_workers(cluster.run(random_programs.run, program=program)) == "equal", name


@pytest.mark.parametrize("cluster", [TWO_REPLICAS], ids=lambda shape: shape.name, indirect=True)
def test_a_program_that_no_part_of_the_batch_fits_is_warned_of(cluster: Cluster) -> None:
    assert cluster.run(random_programs.run, program=THREES) == ["invalid on a part"]
