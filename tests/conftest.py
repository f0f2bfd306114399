"""Fixtures that several test modules share."""

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_pool import ONE_DEVICE, SHAPES, Cluster, Clusters

# Some tests press Ctrl-C, which what is started in the background ignores, and so does all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Of what tests start all workers' output is shown, so that it can be looked at; tests of the default unset it.
os.environ["AUTODIST_OUTPUT"] = "all"

CLUSTERS_OF_A_CASE = 1
IN_TURNS = (
    "benchmarks",
    "capture/batch",
    "capture/doors",
    "diagnostics",
    "lab",
    "oracle",
    "program",
    "saving",
    "servers",
    "strategy_builders",
    "system",
    "tools",
)
"""Folders of tests that take long: of their modules every fourth case is run, unless they are marked otherwise."""
TESTS = Path(__file__).parent
TURN = int(os.environ.get("CORPUS_TURN", "0"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Marks what is slow before pytest leaves it out, and has a module's tests of one cluster run together.

    Modules that take long come first; pytest-xdist keeps the order where it is told `--no-loadscope-reorder`.
    """
    mark_turns(items)
    yield
    modules = list(dict.fromkeys(item.path for item in items))
    long = {item.path for item in items if item.get_closest_marker("first")}
    items.sort(
        key=lambda item: (item.path not in long, modules.index(item.path), names_of_shapes.index(cluster_of(item)))
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is marked `alone` fails in one of several processes (pytest-xdist's): it would measure what others do."""
    if hasattr(item.config, "workerinput") and item.get_closest_marker("alone"):
        pytest.fail(f"{item.nodeid} is marked `alone`, and others run beside it; leave out -n, or what is alone", False)


def mark_turns(items: list[pytest.Item]) -> None:
    """Each case of a test is run on n of its clusters, in turns, as `on(n)` says, or on one; on the others it is slow.

    The next case begins with the next cluster, and so does the next commit (`CORPUS_TURN`). Of a module that is marked
    `turns(n)` every n-th case, and every n-th other test, is run, from another one on for each commit; n is 4 in the
    folders `IN_TURNS`.
    """
    of_modules: dict[Path, list[pytest.Item]] = defaultdict(list)
    tests: dict[tuple[str, int], dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if "cluster" in parameters_of(item):
            marker = item.get_closest_marker("on")
            others = {name: value for name, value in parameters_of(item).items() if name != "cluster"}
            number = marker.args[0] if marker else CLUSTERS_OF_A_CASE
            tests[item.nodeid.partition("[")[0], number][repr(others)].append(item)
        elif turns_of(item) > 1:
            of_modules[item.path].append(item)
    for of_module in of_modules.values():
        for position, item in enumerate(of_module, start=TURN):
            if position % turns_of(item):
                item.add_marker(pytest.mark.slow)
    for (_, number), cases in tests.items():
        for position, on_clusters in enumerate(cases.values(), start=TURN):
            turn, waits = divmod(position, turns_of(on_clusters[0]))
            for place, item in enumerate(on_clusters):
                if waits or (place - turn) % len(on_clusters) >= number:
                    item.add_marker(pytest.mark.slow)


def turns_of(item: pytest.Item) -> int:
    """Of how many commits one runs the test."""
    marker = item.get_closest_marker("turns")
    if marker:
        return int(marker.args[0])
    return 4 if any(item.path.is_relative_to(TESTS / folder) for folder in IN_TURNS) else 1


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


names_of_shapes = ["", *(shape.name for shape in (ONE_DEVICE, *SHAPES))]


def cluster_of(item: pytest.Item) -> str:
    """The name of the cluster that a test runs on, "" for one that needs none."""
    cluster = parameters_of(item).get("cluster")
    return cluster.name if cluster in (ONE_DEVICE, *SHAPES) else ""


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """Those that all modules share which this process runs."""
    shared = Clusters(tmp_path_factory.mktemp)
    yield shared
    shared.close()


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.name)
def cluster(
    request: pytest.FixtureRequest, clusters: Clusters, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster, shared with other modules but for those marked `own_cluster`.

    `parametrize("cluster", ..., indirect=True)` chooses the shapes.
    """
    if request.node.get_closest_marker("own_cluster") is None:
        yield clusters.of(request.param)
        return
    own = Cluster(request.param, tmp_path_factory.mktemp(request.param.name))
    yield own
    own.close()
