"""Programs of `tf.distribute` give the same where variables are on servers, in shards, or there once.

Their reference is TensorFlow's own strategy with mirrored variables, of as many replicas.
"""

from collections.abc import Iterator

import pytest

from tests.support.distribute_branches import RUN_EAGERLY
from tests.support.distribute_outcomes import Outcomes, asked, cases_asked, require_equal
from tests.support.distribute_together import CHECKS

pytestmark = [pytest.mark.first, pytest.mark.turns(2)]
TRAINING = (
    "sgd_with_momentum",
    "adam_with_global_clipnorm",
    "adamw_with_ema",
    "batch_normalization",
    "embedding_under_adam",
    "loss_scaling",
    "slots_made_in_the_first_step",
    "gradient_accumulation",
)
VARIABLES = (
    "a_legacy_optimizer",
    "scattered_updates_of_the_first_replica",
    "a_variable_that_replicas_wrote_apart",
    "assignments_of_each_aggregation",
    "sync_on_read",
    "checkpoints_and_saved_models",
    "writes_after_reads",
)
CUT = tuple(case for case in TRAINING if case != "loss_scaling")
"""A branch over shards which looks something up is refused by name."""
SHARED = "variables_that_are_updated_by_one_value"
REDUCED = "a_loop_over_a_distributed_dataset"
"""What is reduced outside of `run` is added up in another order than on one machine."""
ONE_MACHINE = {
    "PS()": (*TRAINING, *VARIABLES, SHARED, "fit_evaluate_predict", "fit_with_loss_scaling", REDUCED),
    "cut in two": (*CUT, SHARED, "fit_evaluate_predict", "checkpoints_and_saved_models", "a_legacy_optimizer"),
    "Parallax()": ("embedding_under_adam", "batch_normalization"),
    "AllReduce()": ("adam_with_global_clipnorm", "sync_on_read"),
}
"""By builder; the cases on two replicas of one worker."""
TWO_WORKERS = {
    "PS()": (*TRAINING, SHARED, REDUCED, "assignments_of_each_aggregation", "sync_on_read", "a_legacy_optimizer"),
    "PSLoadBalancing()": ("adam_with_global_clipnorm", "batch_normalization"),
    "PartitionedPS(min_shard_bytes=1)": (*TRAINING, SHARED, "checkpoints_and_saved_models", REDUCED),
    "ShardedOptimizer()": ("adam_with_global_clipnorm", "adamw_with_ema", "batch_normalization"),
    "Parallax()": ("embedding_under_adam",),
}
"""By builder; the cases on two workers of one replica."""
TWO_BY_TWO = {
    "PS()": ("adam_with_global_clipnorm", "loss_scaling", "assignments_of_each_aggregation", SHARED),
    "AllReduce()": ("batch_normalization",),
    "AllReduce(factors=True)": ("adamw_with_ema",),
    "Parallax()": ("embedding_under_adam",),
    "PartitionedPS(min_shard_bytes=1)": ("adamw_with_ema", "sync_on_read"),
}
"""By builder; the cases on two workers of two replicas."""


def every(of: dict[str, tuple[str, ...]], name: str) -> list[tuple[str, str]]:
    return [(f"{name} {builder}", case) for builder, cases in of.items() for case in cases]


class Compared:
    """What cases gave under a strategy of TensorFlow's, and under others."""

    def __init__(self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory, reference: str, replicas: int):
        cases: dict[str, list[str]] = {reference: cases_asked(request)}
        for parameters in asked(request):
            cases.setdefault(parameters["kind"], []).append(parameters["case"])
        self._reference = reference
        self._of = {kind: Outcomes(folders.mktemp("auto_dist"), [kind], replicas, *own) for kind, own in cases.items()}

    def require_equal(self, kind: str, case: str, worker: int = 0, *, exactly: bool) -> None:
        theirs = self._of[self._reference].arrays(self._reference, case, worker)
        require_equal(theirs, self._of[kind].arrays(kind, case, worker), exactly=exactly)


@pytest.fixture(scope="module")
def one_machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compared]:
    yield Compared(request, tmp_path_factory, "tensorflow", 2)


@pytest.fixture(scope="module")
def two_workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compared]:
    yield Compared(request, tmp_path_factory, "tensorflow-workers", 1)


@pytest.mark.parametrize(("kind", "case"), every(ONE_MACHINE, "autodist"))
def test_on_one_machine_where_the_builder_says(one_machine: Compared, kind: str, case: str) -> None:
    one_machine.require_equal(kind, case, exactly=case != REDUCED and case not in RUN_EAGERLY)


@pytest.mark.parametrize(("kind", "case"), every(TWO_WORKERS, "autodist-workers"))
def test_on_two_workers_where_the_builder_says(two_workers: Compared, kind: str, case: str) -> None:
    for worker in (0, 1):
        two_workers.require_equal(kind, case, worker, exactly=case not in RUN_EAGERLY)


@pytest.fixture(scope="module")
def two_by_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compared]:
    yield Compared(request, tmp_path_factory, "tensorflow-workers", 2)


@pytest.mark.parametrize(("kind", "case"), every(TWO_BY_TWO, "autodist-workers"))
def test_on_two_workers_of_two_replicas(two_by_two: Compared, kind: str, case: str) -> None:
    for worker in (0, 1):
        two_by_two.require_equal(kind, case, worker, exactly=False)


CENTRAL = (
    "all_reduce_of_a_structure",
    "a_loop_over_a_distributed_dataset",
    "a_function_given_to_run_eagerly",
    "a_legacy_optimizer",
    "a_legacy_optimizer_in_a_plain_function",
    "writes_by_a_handle",
    "embedding_under_sgd",
    "embedding_under_adam",
    "merge_calls",
    "numbers_are_assigned",
    "what_a_merge_call_closes_over",
    "slots_made_in_the_first_step",
    "variables_made_in_the_first_call",
    "writes_after_reads",
)
"""TensorFlow's strategy fails in the others, or has each replica add what all have to a metric."""


@pytest.fixture(scope="module")
def central(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compared]:
    yield Compared(request, tmp_path_factory, "tensorflow-central", 2)


@pytest.mark.parametrize(("kind", "case"), [("central", case) for case in CENTRAL])
def test_central_storage_gives_what_it_gives_under_tensorflows_strategy(
    central: Compared, kind: str, case: str
) -> None:
    central.require_equal(kind, case, exactly=True)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield Outcomes(tmp_path_factory.mktemp("together"), ["together"], 2)


@pytest.mark.parametrize("check", CHECKS)
def test_replicas_that_have_a_variable_together(together: Outcomes, check: str) -> None:
    assert together.arrays("together", check) == []
