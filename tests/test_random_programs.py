"""Random programs, compiled and compared with one device. `make fuzz` runs many more."""

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests import random_programs
from tests.cluster_pool import SHAPES, TWO_REPLICAS, Cluster, same_on_all_workers
from tests.random_programs import BUILDERS, LOSSES, OPERATIONS, RESULTS, SIZES, UPDATES, Operation, RandomProgram

pytestmark = pytest.mark.first

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "240"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
ENOUGH = 100
"""Of fewer programs, those that are refused on every cluster are no share: one of 20 may be."""

operations = st.builds(
    Operation, st.sampled_from(sorted(OPERATIONS)), st.integers(0, 5), st.integers(0, 5), st.integers(0, 9)
)
programs = st.builds(
    RandomProgram,
    st.lists(operations, min_size=1, max_size=12).map(tuple),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(["", "", *sorted(LOSSES)]),
    st.sampled_from(sorted(UPDATES)),
    st.sampled_from(["nothing", "add", "decay", "largest", "loss", "twice"]),
    st.sampled_from(BUILDERS),
    st.integers(0, len(SIZES) - 1),
    st.sampled_from(sorted(RESULTS)),
)


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """It says whether a program that was refused on another cluster is refused for what it is."""
    started = Cluster(TWO_REPLICAS, tmp_path_factory.mktemp("one-worker"))
    yield started
    started.close()


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
    @given(programs)
    def trial(program: RandomProgram) -> None:
        outcome = same_on_all_workers(cluster.run(random_programs.run, program=program))
        outcomes[outcome.partition(":")[0]] += 1
        if outcome.startswith("refused"):
            assert one_worker.run(random_programs.run, program=program) == [outcome], "it is refused on this cluster"

    trial()
    print(dict(outcomes))
    tried = outcomes.total() - outcomes["invalid"] - outcomes["invalid on nothing"]
    if outcomes.total() >= ENOUGH:
        assert outcomes["refused"] <= 0.05 * tried, outcomes
    assert outcomes["equal"] >= 0.4 * tried, outcomes
