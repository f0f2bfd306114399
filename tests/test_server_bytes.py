"""What variables on servers send over the wire is what they must, and little more."""

import pytest

from benchmarks import server_bytes
from tests.cluster_pool import TWO_WORKERS, Cluster

pytestmark = pytest.mark.parametrize(
    "cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)


@pytest.mark.parametrize("name", server_bytes.CASES)
def test_no_more_is_sent_than_is_allowed(cluster: Cluster, name: str) -> None:
    sent, _ = cluster.run(server_bytes.measured, name=name)
    assert 0.9 * sent.least <= sent.measured <= sent.allowed
