"""The distributed session, TF1 and tf_keras optimizers × models × clusters: equal to one device."""

import pytest

from tests.support.cluster_pool import Cluster, same_on_all_workers
from tests.support.oracle import Values, compare_graph
from tests.support.oracle_matrix import matrix
from tests.support.oracle_programs import GRAPH_FAMILIES, batches, graph_program


def train(family: str, optimizer: str, model: str, clip: bool) -> Values:
    return compare_graph(graph_program(model, optimizer, family, clip=clip), batches(model))


@pytest.mark.parametrize(
    ("cluster", "family", "optimizer", "model", "clip"), matrix(GRAPH_FAMILIES), indirect=["cluster"], scope="module"
)
def test_a_graph_trains_as_one_device_does(cluster: Cluster, family: str, optimizer: str, model: str, clip: bool):
    same_on_all_workers(cluster.run(train, family=family, optimizer=optimizer, model=model, clip=clip))
