"""Fixtures that several test modules share."""

import signal
from collections.abc import Iterator

import pytest

from tests.cluster_pool import SHAPES, Cluster

# Some tests press Ctrl-C, which what is started in the background ignores, and so does all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.name)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster, started once per module and shape; `parametrize("cluster", ..., indirect=True)` chooses the shapes."""
    started = Cluster(request.param, tmp_path_factory.mktemp(request.param.name))
    yield started
    started.close()
