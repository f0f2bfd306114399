"""`@autodist.function`, optimizers × models × clusters: equal to one device."""

import pytest

from tests.support.cluster_pool import Cluster, same_on_all_workers
from tests.support.oracle import Values, compare_function
from tests.support.oracle_matrix import matrix
from tests.support.oracle_programs import FUNCTION_FAMILIES, batches


def train(family: str, optimizer: str, model: str, clip: bool) -> Values:
    return compare_function(FUNCTION_FAMILIES[family](model, optimizer, clip=clip), batches(model))


@pytest.mark.parametrize(
    ("cluster", "family", "optimizer", "model", "clip"), matrix(FUNCTION_FAMILIES), indirect=["cluster"], scope="module"
)
def test_a_compiled_function_trains_as_one_device_does(
    cluster: Cluster, family: str, optimizer: str, model: str, clip: bool
):
    same_on_all_workers(cluster.run(train, family=family, optimizer=optimizer, model=model, clip=clip))
