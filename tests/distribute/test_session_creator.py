"""Monitored sessions and their hooks over the distributed session do what they do over TensorFlow's, on one device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist, ClusterError, SessionError
from autodist_py.distribute import SessionCreator
from autodist_py.strategy_builders.parameter_server import PS
from tests.support.cluster_pool import TWO_REPLICAS, TWO_WORKERS, Cluster, same_on_all_workers
from tests.support.oracle import assert_close, settings

on_two = pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda s: s.name, indirect=True, scope="module")

v1 = tf.compat.v1
SIZES = (6, 7, 5, 6, 8, 5, 7, 6)


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    x = rng.normal(size=(SIZES[number % len(SIZES)], 3))
    return x, x @ [[1.0], [-2.0], [0.5]] + 0.1 * rng.normal(size=(len(x), 1))


@dataclass
class Model:
    """A regression with Adam, whose rate is fed, and what hooks are made of."""

    x: tf.Tensor
    y: tf.Tensor
    rate: tf.Tensor
    loss: tf.Tensor
    train: Any
    variables: list[Any]

    def feed(self, number: int) -> dict[Any, Any]:
        x, y = batch(number)
        return {self.x: x, self.y: y}


def build() -> Model:
    x, y = v1.placeholder(tf.float64, [None, 3]), v1.placeholder(tf.float64, [None, 1])
    rate = v1.placeholder_with_default(np.float64(0.1), [])
    kernel = v1.get_variable("kernel", initializer=np.array([[0.3], [-0.2], [0.1]]))
    bias = v1.get_variable("bias", initializer=np.zeros(1))
    loss = tf.reduce_mean(tf.square(x @ kernel + bias - y), name="loss")
    v1.summary.scalar("loss", loss)
    steps = v1.train.get_or_create_global_step()
    seen = v1.get_variable("seen", initializer=np.int64(0), trainable=False, collections=[v1.GraphKeys.LOCAL_VARIABLES])
    before = steps.read_value() + 0
    v1.add_to_collection("global_step_read_op_cache", before)  # Hooks fetch it: of the steps before this one.
    with tf.control_dependencies([before]):
        train = v1.train.AdamOptimizer(rate).minimize(loss, global_step=steps)
    with tf.control_dependencies([train]):
        train = seen.assign_add(1).op
    return Model(x, y, rate, loss, train, [*v1.global_variables(), seen])


class Losses(tf.compat.v1.train.SessionRunHook):
    """A user's own: it fetches the loss, feeds the rate that follows from it, and notes when it is called."""

    def __init__(self, model: Model):
        self._model = model
        self.values: list[float] = []
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")
        self._twice = 2.0 * self._model.loss

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.calls.append(f"after_create_session {session.run(v1.train.get_global_step())}")

    def before_run(self, run_context: Any) -> Any:
        rate = np.float64(0.1 if len(self.values) < 3 else 0.05)
        return v1.train.SessionRunArgs({"twice": [self._twice]}, {self._model.rate: rate})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.values.append(float(run_values.results["twice"][0]))

    def end(self, session: Any) -> None:
        self.calls.append(f"end {session.run(v1.train.get_global_step())}")


@dataclass
class Outcome:
    """What a monitored run has left."""

    weights: dict[str, np.ndarray] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    logged: list[float] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


def hooks_of(model: Model, *, last_step: int, outcome: Outcome) -> list[Any]:
    def note(values: Any) -> str:
        outcome.logged.append(float(values["loss"]))
        return str(values)

    own = Losses(model)
    outcome.losses, outcome.calls = own.values, own.calls
    return [
        own,
        v1.train.StopAtStepHook(last_step=last_step),
        v1.train.LoggingTensorHook({"loss": model.loss}, every_n_iter=2, formatter=note),
        v1.train.NanTensorHook(model.loss),
    ]


def summaries_of(directory: str, first: int) -> str:
    """Where the run from the step `first` on writes: a second file of one second would have the first one's name."""
    return f"{directory}/from-{first}"


def writing_hooks(directory: str, first: int) -> list[Any]:
    """Those that MonitoredTrainingSession has on a chief."""
    summaries = summaries_of(directory, first)
    return [
        v1.train.StepCounterHook(every_n_steps=2, output_dir=summaries),
        v1.train.SummarySaverHook(save_steps=2, output_dir=summaries, summary_op=v1.summary.merge_all()),
        v1.train.CheckpointSaverHook(directory, save_steps=3),
    ]


def written_in(directory: str, first: int) -> dict[str, Any]:
    """The checkpoints of a directory, with their values, and a run's summaries of the loss, by step."""
    state = tf.train.get_checkpoint_state(directory)
    found: dict[str, Any] = {}
    for path in state.all_model_checkpoint_paths:
        reader = tf.train.load_checkpoint(path)
        names = reader.get_variable_to_shape_map()
        found[Path(path).name] = {name: reader.get_tensor(name) for name in names}
    losses: dict[int, float] = {}
    speeds: set[int] = set()
    for file in sorted(Path(summaries_of(directory, first)).glob("events.*")):
        for event in v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.tag == "loss":
                    losses[event.step] = value.simple_value
                if value.tag == "global_step/sec":
                    speeds.add(event.step)
    return found | {"losses": losses, "speeds": speeds}


def run(session: Any, model: Model, outcome: Outcome, first: int = 0) -> None:
    """The program: the same for both."""
    number = first
    with session as monitored:
        while not monitored.should_stop():
            monitored.run(model.train, model.feed(number))
            number += 1
        values = monitored.run_step_fn(lambda step_context: step_context.session.run(model.variables))
    outcome.weights = {one.op.name: value for one, value in zip(model.variables, values, strict=True)}


def on_one_device(directory: str, *, last_step: int, first: int) -> Outcome:
    outcome = Outcome()
    v1.summary.FileWriterCache.clear()
    with tf.Graph().as_default():
        model = build()
        hooks = hooks_of(model, last_step=last_step, outcome=outcome)
        where = {"checkpoint_dir": directory, "summary_dir": summaries_of(directory, first)}
        every = {"save_checkpoint_steps": 3, "save_summaries_steps": 2, "log_step_count_steps": 2}
        run(v1.train.MonitoredTrainingSession(hooks=hooks, **where, **every), model, outcome, first)
    return outcome


def distributed(autodist: AutoDist, directory: str, *, last_step: int, first: int) -> Outcome:
    outcome = Outcome()
    v1.summary.FileWriterCache.clear()
    with tf.Graph().as_default():
        with autodist.scope():
            model = build()
        hooks = hooks_of(model, last_step=last_step, outcome=outcome)
        hooks += writing_hooks(directory, first) if autodist.is_chief else []
        own = directory if autodist.is_chief else f"{directory}-of-nobody"
        creator = SessionCreator(autodist, checkpoint_dir=own)
        run(v1.train.MonitoredSession(session_creator=creator, hooks=hooks), model, outcome, first)
    return outcome


def compare(mine: Outcome, theirs: Outcome) -> None:
    assert mine.calls == theirs.calls
    assert_close(mine.losses, theirs.losses, "what the user's hook fetched")
    assert_close(mine.logged, theirs.logged, "what LoggingTensorHook fetched")
    assert mine.weights.keys() == theirs.weights.keys()
    for name, value in theirs.weights.items():
        assert_close(mine.weights[name], value, name)


def compare_written(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    assert mine["speeds"] == theirs["speeds"]
    assert mine["losses"].keys() == theirs["losses"].keys()
    for step, value in theirs["losses"].items():
        assert_close(mine["losses"][step], value, f"summary of step {step}", 1e-6)
    for path in theirs.keys() - {"losses", "speeds"}:
        assert mine[path].keys() == theirs[path].keys()
        for name, value in theirs[path].items():
            assert_close(mine[path][name], value, f"{name} in {path}")


def train_and_go_on(directory: str, builder: Any = None) -> dict[str, np.ndarray]:
    """Two runs, the second of which begins with the first one's checkpoint, of both."""
    for first, last in ((0, 5), (5, 7)):
        with AutoDist(strategy_builder=builder) as autodist:
            plain, ours = f"{directory}/plain-{autodist.rank}", f"{directory}/ours"
            theirs = on_one_device(plain, last_step=last, first=first)
            mine = distributed(autodist, ours, last_step=last, first=first)
            compare(mine, theirs)
            if autodist.is_chief:
                compare_written(written_in(ours, first), written_in(plain, first))
    return mine.weights


@pytest.mark.parametrize("cluster", [TWO_REPLICAS, TWO_WORKERS], ids=lambda s: s.name, indirect=True, scope="module")
def test_a_monitored_session_and_its_hooks_are_those_of_one_device(cluster: Cluster, tmp_path: Path):
    same_on_all_workers(cluster.run(train_and_go_on, directory=str(tmp_path)))


@on_two
def test_hooks_see_what_servers_hold(cluster: Cluster, tmp_path: Path):
    same_on_all_workers(cluster.run(train_and_go_on, directory=str(tmp_path), builder=PS()))


class Now(tf.compat.v1.train.SessionRunHook):
    """Fetches a tensor in some runs, as a hook with a clock does, and feeds one where it is given."""

    def __init__(self, tensor: tf.Tensor, runs: Sequence[int], feeds: tf.Tensor | None = None):
        self._tensor, self._runs, self._feeds = tensor, runs, feeds
        self._number = 0
        self.values: list[float] = []

    def before_run(self, run_context: Any) -> Any:
        fed = {} if self._feeds is None else {self._feeds: np.float64(0.2)}
        return v1.train.SessionRunArgs(self._tensor if self._number in self._runs else None, fed)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.values += [] if run_values.results is None else [float(run_values.results)]
        self._number += 1


@contextmanager
def monitored(autodist: AutoDist, make_hooks: Any, **scaffold: Any) -> Iterator[tuple[Any, Model]]:
    with tf.Graph().as_default():
        with autodist.scope():
            model = build()
            made = {name: make() for name, make in scaffold.items()}
        creator = SessionCreator(autodist, v1.train.Scaffold(**made))
        with v1.train.MonitoredSession(session_creator=creator, hooks=make_hooks(model)) as session:
            yield session, model


def fetch_at_other_times() -> dict[str, np.ndarray]:
    """Each worker's hook fetches in runs of its own; all workers take the steps together."""
    expected = []
    with tf.Graph().as_default():
        model = build()
        with v1.train.SingularMonitoredSession() as plain:
            for number in range(5):
                expected.append(plain.run([model.loss, model.train], model.feed(number))[0])
            weights = plain.raw_session().run(model.variables)
    with AutoDist() as autodist:
        runs = [(0, 3), (1, 3, 4)][autodist.rank]
        hooks: list[Now] = []

        def make(model: Model) -> list[Now]:
            hooks.append(Now(model.loss, runs))
            return hooks

        with monitored(autodist, make) as (session, model):
            for number in range(5):
                assert session.run(model.train, model.feed(number)) is None
            values = session.run_step_fn(lambda step_context: step_context.session.run(model.variables))
        assert_close(hooks[0].values, [expected[number] for number in runs], "what the hook fetched")
        for mine, theirs in zip(values, weights, strict=True):
            assert_close(mine, theirs, "variables")
        return dict(zip("01234567", values, strict=False))


@on_two
def test_each_worker_has_hooks_that_fetch_in_runs_of_their_own(cluster: Cluster):
    same_on_all_workers(cluster.run(fetch_at_other_times))


def refuse() -> None:
    with AutoDist() as autodist:
        feeding = partial(_feeding, is_chief=autodist.is_chief)
        chief_feeds = pytest.raises(SessionError, match=r"chief feeds .*WithDefault:0.*worker 1 \('Placeholder:0', 'P")
        with monitored(autodist, feeding) as (session, model), chief_feeds:
            session.run(model.train, model.feed(0))
    with AutoDist() as autodist, tf.Graph().as_default():
        with autodist.scope():
            build()
        with tf.Graph().as_default(), pytest.raises(SessionError, match=r"default graph is another.*same `with tf.Gr"):
            SessionCreator(autodist).create_session()
    not_ready = pytest.raises(
        RuntimeError, match=r"not make model ready.*initialized: bias, .*Give Scaffold an init_op"
    )
    with AutoDist() as autodist, not_ready, monitored(autodist, lambda _: [], init_op=tf.no_op, ready_op=_unready):
        pass
    with AutoDist() as autodist:
        with pytest.raises(ValueError, match=r"checkpoint_dir, whose last.*or checkpoint_file.*received 'a' and 'b'"):
            SessionCreator(autodist, checkpoint_dir="a", checkpoint_filename_with_path="b")
        with pytest.raises(SessionError, match=r"autodist.*'none'"):
            SessionCreator("none")  # type: ignore[arg-type]


def _feeding(model: Model, *, is_chief: bool) -> list[Now]:
    return [Now(model.loss, [], model.rate if is_chief else None)]


def _unready() -> tf.Tensor:
    return tf.constant(["bias", "kernel"])


@on_two
def test_what_a_monitored_session_cannot_be_is_refused(cluster: Cluster):
    cluster.run(refuse)


def lose_the_session() -> None:
    """A step raises what MonitoredSession would make another session for, which one worker cannot do alone."""
    with AutoDist() as autodist, monitored(autodist, lambda _: []) as (session, model):
        session.run(model.train, model.feed(0))
        raw = session._tf_sess()

        class Lost:
            goes_among = ""

            def run(self, feeds: Any) -> list[Any]:
                raise tf.errors.UnavailableError(None, None, "the server is gone")

        raw._source.make = lambda signature, feeds: Lost()
        with pytest.raises(ClusterError, match=r"one worker cannot make another by itself: the server is gone. Start"):
            session.run([model.train, model.loss], model.feed(1))
        assert session._tf_sess() is raw


@on_two
def test_a_lost_session_is_not_made_again_by_one_worker(cluster: Cluster):
    cluster.run(lose_the_session)


def restore_one_file(directory: str) -> list[np.ndarray]:
    """Of a named checkpoint, which the chief alone has; it counts the earlier ones among its own."""
    with AutoDist() as autodist, monitored(autodist, lambda _: []) as (session, model):
        session.run(model.train, model.feed(0))
        raw = session._tf_sess()
        before = raw.run(model.variables)
        if autodist.is_chief:
            v1.get_collection(v1.GraphKeys.SAVERS)[0].save(raw, f"{directory}/kept", write_meta_graph=False)
    path = f"{directory}/kept" if autodist.is_chief else f"{directory}/of-nobody"
    with AutoDist() as autodist, tf.Graph().as_default():
        with autodist.scope():
            model = build()
        creator = SessionCreator(autodist, checkpoint_filename_with_path=path)
        with v1.train.MonitoredSession(session_creator=creator) as session:
            after = session._tf_sess().run(model.variables)
    for mine, theirs in zip(after[:-1], before[:-1], strict=True):
        assert_close(mine, theirs, "restored")
    return after


@on_two
def test_a_named_checkpoint_of_the_chief_is_everyones(cluster: Cluster, tmp_path: Path):
    same_on_all_workers(cluster.run(restore_one_file, directory=str(tmp_path)))


def test_what_a_monitored_session_trains_is_recorded_for_verify(tmp_path: Path):
    with (
        settings(record_dir=tmp_path, recorded_run="plain", record_steps=2),
        AutoDist() as autodist,
        monitored(autodist, lambda _: []) as (session, model),
    ):
        assert session.graph.finalized
        session.run(model.train, model.feed(0))
    assert list(tmp_path.iterdir())
