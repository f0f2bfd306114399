"""A step with its hooks: who is called when, and which error the script gets."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from autodist_py.cluster.cluster import SoloCluster
from autodist_py.cluster.run_failure import CAUSE_SECONDS
from autodist_py.cluster.step_hook import StepHook
from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.program.step import StepProgram
from autodist_py.program.together import Together
from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.servers.parameter_servers import OpenMessages


class Noting(StepHook):
    """Notes its calls; raises where it is told to."""

    def __init__(self, name: str, calls: list[str], **raises: Exception):
        self.name, self.calls, self.raises = name, calls, raises

    def before(self, step: int, feeds: Sequence[tf.Tensor]) -> None:
        self._called("before", f" {step}")

    def after(self, step: int) -> None:
        self._called("after", f" {step}")

    def failed(self, step: int, error: BaseException) -> None:
        self._called("failed", f" {step}: {error}")

    def _called(self, method: str, details: str) -> None:
        self.calls.append(f"{self.name} {method}{details}")
        if method in self.raises:
            raise self.raises[method]


def program(*hooks: StepHook, raises: Exception | None = None, cluster: Any = None) -> StepProgram:
    """One whose step returns its feeds, or raises."""

    def run(feeds: Sequence[tf.Tensor]) -> list[Any]:
        if raises is not None:
            raise raises
        return list(feeds)

    executor: Any = SimpleNamespace(run=run)
    return StepProgram(executor, cluster or SoloCluster(local_resource_spec(1)), hooks)


def test_hooks_nest_around_a_step() -> None:
    calls: list[str] = []
    step = program(Noting("a", calls), StepHook(), Noting("b", calls))

    assert step.run([tf.constant(3)]) == [tf.constant(3)]
    assert calls == ["a before 1", "b before 1", "b after 1", "a after 1"]


def test_a_hook_that_refuses_a_step_is_not_told_of_its_end_and_the_earlier_ones_are() -> None:
    calls: list[str] = []
    step = program(Noting("a", calls), Noting("b", calls, before=ValueError("no")), Noting("c", calls))

    with pytest.raises(ValueError, match="no"):
        step.run([])
    assert calls == ["a before 1", "b before 1", "a failed 1: no"]


@pytest.mark.parametrize("method", ["after", "failed"])
def test_what_a_hook_raises_takes_the_place_of_what_was(method: str) -> None:
    calls: list[str] = []
    error = OSError("full") if method == "failed" else None
    step = program(Noting("a", calls), Noting("b", calls, **{method: KeyError("mine")}), raises=error)

    with pytest.raises(KeyError, match="mine") as raised:
        step.run([])
    assert calls[2:] == [f"b {method} 1{': full' if error else ''}", "a failed 1: 'mine'"]
    assert raised.value.__context__ is error


def test_an_interrupted_step_has_failed() -> None:
    calls: list[str] = []
    interrupted: Any = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        program(Noting("a", calls), raises=interrupted).run([])
    assert calls == ["a before 1", "a failed 1: "]


def test_steps_of_all_programs_of_a_process_are_counted_together() -> None:
    cluster, calls = SoloCluster(local_resource_spec(1)), []  # type: SoloCluster, list[str]
    for name in ("a", "b"):
        step = program(Together(cluster, [], 0.0), Noting(name, calls), cluster=cluster)
        step.run([])
        step.run([])
    assert [call for call in calls if "before" in call] == ["a before 1", "a before 2", "b before 3", "b before 4"]


class Servers:
    """The messages and the variables of a program, as OpenMessages uses them."""

    def __init__(self, error: Exception | None = None):
        self.is_closed, self.error, self.was_half_done = False, error, False

    def close(self) -> None:
        self.is_closed = True

    def half_done(self) -> None:
        self.was_half_done = True


def served(servers: Any, raises: Exception | None) -> StepProgram:
    cluster = SoloCluster(local_resource_spec(1))
    hooks = OpenMessages(cluster, servers, servers), Together(cluster, [], 0.0)
    return program(*hooks, raises=raises, cluster=cluster)


def test_a_step_that_fails_half_way_ends_its_servers_and_the_next_one_says_so() -> None:
    servers = Servers()
    step = served(servers, tf.errors.InvalidArgumentError(None, None, "no such row"))

    with pytest.raises(tf.errors.InvalidArgumentError, match="no such row"):
        step.run([])
    assert servers.is_closed
    assert servers.was_half_done
    with pytest.raises(ClusterError, match="servers have ended"):
        step.run([])


def test_where_the_data_end_servers_go_on() -> None:
    servers = Servers()
    with pytest.raises(tf.errors.OutOfRangeError):
        served(servers, tf.errors.OutOfRangeError(None, None, "End of sequence")).run([])
    assert not servers.is_closed


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ClusterError("a server is lost"), "a server is lost"),
        (tf.errors.UnavailableError(None, None, "reset by peer"), "seen here: UnavailableError: reset by peer"),
    ],
)
def test_what_closed_the_messages_is_the_cause_of_the_step_that_waited_for_them(error: Exception, shown: str) -> None:
    servers = Servers(error)
    with pytest.raises(ClusterError, match=shown):
        waiting_for(servers, SoloCluster(local_resource_spec(1))).run([])


def test_a_steps_own_error_is_raised_where_another_worker_has_closed_the_messages_before() -> None:
    servers = Servers(tf.errors.OutOfRangeError(None, None, "queue is closed"))
    too_large = tf.errors.InvalidArgumentError(None, None, "too large")
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        waiting_for(servers, SoloCluster(local_resource_spec(1)), too_large).run([])
    assert servers.was_half_done


QUEUE_CLOSED = tf.errors.OutOfRangeError(None, None, "queue is closed")


def waiting_for(servers: Any, cluster: SoloCluster, error: Exception = QUEUE_CLOSED) -> StepProgram:
    """A program whose servers close while a step runs, which then fails with this error."""

    def fail(feeds: Sequence[tf.Tensor]) -> list[Any]:
        servers.close()
        raise error

    executor: Any = SimpleNamespace(run=fail)
    return StepProgram(executor, cluster, [OpenMessages(cluster, servers, servers), Together(cluster, [], 0.0)])


def test_a_servers_process_that_has_ended_is_the_cause_once_the_chief_tells_of_it() -> None:
    class TellsLate(SoloCluster):
        def failure(self, *, wait: float = CAUSE_SECONDS) -> WorkerFailedError | None:
            return WorkerFailedError("worker 1 ended: killed by SIGSEGV") if wait else None

    servers = Servers(tf.errors.UnavailableError(None, None, "Socket closed"))
    with pytest.raises(WorkerFailedError, match="killed by SIGSEGV"):
        waiting_for(servers, TellsLate(local_resource_spec(1))).run([])
