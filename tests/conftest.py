"""Fixtures that several test modules share."""

from collections.abc import Iterator

import pytest

from tests.cluster_pool import SHAPES, Cluster


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.name)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster, started once per module and shape; `parametrize("cluster", ..., indirect=True)` chooses the shapes."""
    started = Cluster(request.param, tmp_path_factory.mktemp(request.param.name))
    yield started
    started.close()
