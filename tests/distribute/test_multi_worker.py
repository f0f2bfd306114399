"""Programs of `tf.distribute` give on two workers what they give under TensorFlow's strategy, on each of them.

Of one replica on each they give the same bits. With two on each values are added up in another order.
"""

from collections.abc import Iterator

import pytest

from tests.support import distribute_branches, distribute_training, distribute_variables
from tests.support.distribute_branches import RUN_EAGERLY
from tests.support.distribute_cases import CASES
from tests.support.distribute_outcomes import Outcomes, cases_asked, require_equal

pytestmark = [pytest.mark.first, pytest.mark.turns(2)]
assert distribute_branches and distribute_training and distribute_variables  # They add their cases.
KINDS = ("tensorflow-workers", "ours-workers")

FAILS_ON_WORKERS = {
    "all_gather_and_its_gradient": "TensorFlow: 'destinations can not be empty' where a worker has one device",
    "fit_evaluate_predict": "Keras 3 gives a batch of PerReplicas to a reduce() that takes one",
    "fit_with_loss_scaling": "the same",
}
"""These are compared with as many replicas of one machine."""
WAITS_FOR_EVER = ("loss_scaling_with_an_infinite_gradient",)
"""As well, since each of TensorFlow's workers asks its own replica alone whether it trains."""
OF_TWO_REPLICAS = (
    "all_reduce_of_a_structure",
    "all_reduce_of_ints_and_sparse",
    "all_gather_and_its_gradient",
    "merge_calls",
    "what_each_worker_has",
    "a_variable_that_replicas_wrote_apart",
    "what_a_merge_call_closes_over",
    "assignments_of_each_aggregation",
    "sync_on_read",
    "a_loop_over_a_distributed_dataset",
    "structures_and_python_values",
    "reduce_along_an_axis_and_gather",
    "updates_for_all_replicas",
    "adam_with_global_clipnorm",
    "synchronized_batch_normalization",
    "embedding_under_adam",
    "loss_scaling",
)
"""In which it matters that a worker has several. TensorFlow then makes no variable in a step."""
IN_ANOTHER_ORDER = {"embedding_under_sgd"}
"""Sparse gradients are added up as dense ones."""


@pytest.fixture(scope="module")
def one_replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield Outcomes(tmp_path_factory.mktemp("workers"), KINDS, 1, *cases_asked(request))


@pytest.fixture(scope="module")
def only_ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield Outcomes(tmp_path_factory.mktemp("workers"), ["ours-workers"], 1, *cases_asked(request))


@pytest.fixture(scope="module")
def two_replicas(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield Outcomes(tmp_path_factory.mktemp("workers"), KINDS, 2, *cases_asked(request))


@pytest.fixture(scope="module")
def one_machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield Outcomes(tmp_path_factory.mktemp("machine"), ["tensorflow"], 2, *cases_asked(request))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in FAILS_ON_WORKERS and case not in WAITS_FOR_EVER]
)
def test_a_program_gives_what_it_gives_under_tensorflows_strategy(one_replica: Outcomes, case: str) -> None:
    for worker in (0, 1):
        theirs, ours = (one_replica.arrays(kind, case, worker) for kind in KINDS)
        require_equal(theirs, ours, exactly=case not in IN_ANOTHER_ORDER | RUN_EAGERLY)


@pytest.mark.parametrize("case", OF_TWO_REPLICAS)
def test_with_two_replicas_on_each_worker_too(two_replicas: Outcomes, case: str) -> None:
    for worker in (0, 1):
        theirs, ours = (two_replicas.arrays(kind, case, worker) for kind in KINDS)
        require_equal(theirs, ours, exactly=False)


@pytest.mark.parametrize("case", ["all_gather_and_its_gradient"])
def test_a_gradient_of_what_is_gathered_is_that_of_one_machine(
    one_replica: Outcomes, one_machine: Outcomes, case: str
) -> None:
    theirs = one_machine.arrays("tensorflow", case)
    for worker in (0, 1):
        require_equal(theirs[worker::2], one_replica.arrays("ours-workers", case, worker), exactly=True)


def require_as_on_one_machine(theirs: Outcomes, ours: Outcomes, case: str) -> None:
    """They show the same, and a worker has the components of its replica's variables, of two of each."""
    for worker in (0, 1):
        whole, own = theirs.arrays("tensorflow", case), ours.arrays("ours-workers", case, worker)
        shown = len(whole) - 2 * (len(whole) - len(own))
        require_equal([*whole[:shown], *whole[shown + worker :: 2]], own, exactly=True)


@pytest.mark.parametrize("case", ["fit_evaluate_predict", "fit_with_loss_scaling"])
def test_kerass_fit_evaluate_and_predict_give_what_they_give_on_one_machine(
    one_replica: Outcomes, one_machine: Outcomes, case: str
) -> None:
    require_as_on_one_machine(one_machine, one_replica, case)


@pytest.mark.parametrize("case", WAITS_FOR_EVER)
def test_a_step_that_one_replica_cannot_take_is_taken_by_none(
    only_ours: Outcomes, one_machine: Outcomes, case: str
) -> None:
    require_as_on_one_machine(one_machine, only_ours, case)
