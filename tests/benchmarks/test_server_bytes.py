"""What variables on servers send over the wire is what they must, and little more."""

import pytest

from benchmarks import server_bytes
from tests.support.cluster_pool import THREE_WORKERS, TWO_WORKERS, Cluster

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("cluster", "name"),
    [(THREE_WORKERS if name in server_bytes.ON_THREE else TWO_WORKERS, name) for name in server_bytes.CASES],
    ids=list(server_bytes.CASES),
    indirect=["cluster"],
    scope="module",
)
def test_no_more_is_sent_than_is_allowed(cluster: Cluster, name: str) -> None:
    sent, *_ = cluster.run(server_bytes.measured, name=name)
    assert 0.9 * sent.least <= sent.measured <= sent.allowed
