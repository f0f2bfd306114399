"""One AutoDist object captures one graph, and has one session at a time over it."""

from typing import Any

import pytest
import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.program.graph_mode import GraphMode
from autodist_py.program.kept_programs import Bound
from autodist_py.proto.errors import CaptureError


class Mode:
    """It makes no program."""

    def session_programs(self, scope: Any) -> "Mode":
        return self

    def close(self) -> None:
        """See SessionPrograms."""


@pytest.fixture
def graph_mode() -> GraphMode:
    return GraphMode(CaptureOptions(batch_statistics="replica"), 7, Bound(3, lambda said: None))


def test_the_same_graph_is_captured_again_and_another_is_refused(graph_mode: GraphMode) -> None:
    with tf.Graph().as_default():
        assert graph_mode.scope() is graph_mode.scope()
    with tf.Graph().as_default(), pytest.raises(CaptureError, match="entered with another graph than before"):
        graph_mode.scope()


def test_without_a_graph_there_is_nothing_to_run_or_plan(graph_mode: GraphMode) -> None:
    mode: Any = Mode()
    with pytest.raises(CaptureError, match=r"no graph was built in scope\(\)"):
        graph_mode.session(mode)
    with pytest.raises(CaptureError, match=r"needs a graph built in scope\(\)"):
        graph_mode.item()
    graph_mode.close()


def test_a_second_session_comes_after_the_first_is_closed(graph_mode: GraphMode) -> None:
    mode: Any = Mode()
    with tf.Graph().as_default():
        graph_mode.scope()
    first = graph_mode.session(mode)
    with pytest.raises(CaptureError, match="has an open session already"):
        graph_mode.session(mode)
    first.close()
    second = graph_mode.session(mode)
    graph_mode.close()
    assert second.closed
