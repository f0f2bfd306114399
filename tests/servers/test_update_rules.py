"""The rules of servers, driven by random schedules of workers, against what they promise."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.proto.synchronizers import Consistency
from autodist_py.servers.update_rules import AsTheyArrive, Bounded, FirstToArrive, Together, Tokens, rule_of

schedules = st.lists(st.integers(0, 10**6), min_size=1, max_size=300)


class Workers:
    """Workers that send when a schedule says so, wait for answers, and now and then all meet."""

    def __init__(self, rule, number):
        self.rule = rule
        self.computing, self.waiting, self.paused = set(range(number)), set(), set()
        self.sent: Counter[int] = Counter()
        self.answers: Counter[int] = Counter()
        self.updates = []
        self.used: Counter[int] = Counter()
        self.dropped: Counter[int] = Counter()

    def send(self, choice):
        worker = sorted(self.computing)[choice % len(self.computing)]
        self.computing.remove(worker)
        self.waiting.add(worker)
        self.sent[worker] += 1
        self.take(self.rule.arrived(worker))

    def meet(self, choice):
        """One of those who may stops before a meeting; when all have, they go on."""
        worker = sorted(self.computing)[choice % len(self.computing)]
        self.computing.remove(worker)
        self.paused.add(worker)
        self.take(self.rule.paused(worker))

    def lose(self, worker):
        for those in (self.computing, self.paused, self.waiting):
            those.discard(worker)
        self.take(self.rule.lost(worker))

    def take(self, decision):
        if decision.joined:
            self.updates.append(decision.joined)
        self.used.update(decision.joined)
        self.dropped.update(decision.dropped)
        for worker in decision.answered:
            assert worker in self.waiting, "an answer without a message"
            self.waiting.remove(worker)
            self.computing.add(worker)
            self.answers[worker] += 1
        for worker, count in (self.used + self.dropped).items():
            assert count <= self.sent[worker], "a message is used twice"


@given(schedule=schedules, number=st.integers(1, 5))
def test_together_every_update_is_made_of_one_message_of_each(schedule, number):
    workers = Workers(Together(range(number)), number)
    for choice in schedule:
        workers.send(choice)
        assert workers.computing, "all wait"
    assert all(update == tuple(range(number)) for update in workers.updates)
    assert len(workers.updates) == min(workers.sent[worker] for worker in range(number))


@given(schedule=schedules, number=st.integers(1, 5))
def test_as_they_arrive_every_message_is_one_update(schedule, number):
    workers = Workers(AsTheyArrive(), number)
    for choice in schedule:
        workers.send(choice)
    assert workers.used == workers.sent == workers.answers


@given(schedule=schedules, number=st.integers(1, 5), staleness=st.integers(0, 6))
def test_bounded_nobody_is_further_ahead_and_the_slowest_never_waits(schedule, number, staleness):
    workers = Workers(Bounded(range(number), staleness), number)
    for choice in schedule:
        workers.send(choice)
        slowest = min(workers.sent[worker] for worker in range(number))
        for worker in range(number):
            assert workers.answers[worker] <= slowest + staleness
            # Nor does anybody wait for longer than the bound asks for.
            assert (worker in workers.waiting) == (workers.sent[worker] > slowest + staleness)
    assert workers.used == workers.sent


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_bounded_reaches_its_bound(staleness):
    workers = Workers(Bounded(range(3), staleness), 3)
    for _ in range(staleness + 1):
        workers.computing &= {0}
        workers.send(0)
    assert workers.answers[0] == staleness
    assert workers.waiting == {0}


@given(schedule=schedules, number=st.integers(1, 5), wanted=st.integers(1, 9))
def test_first_to_arrive_updates_are_of_new_gradients_and_nobody_waits_for_ever(schedule, number, wanted):
    rule = FirstToArrive(range(number), wanted)
    workers = Workers(rule, number)
    seen = dict.fromkeys(range(number), 0)
    for choice in schedule:
        answered, updates = workers.answers.copy(), len(workers.updates)
        before = {worker: seen[worker] for worker in workers.computing}
        sender = sorted(workers.computing)[choice % len(workers.computing)]
        workers.send(choice)
        late = before[sender] < updates
        assert (workers.dropped[sender] == rule.dropped[sender]) and (not late or sender in workers.computing)
        for worker in range(number):
            if workers.answers[worker] > answered[worker]:
                seen[worker] = len(workers.updates)
        assert workers.computing, "all wait"
    assert all(len(update) == wanted for update in workers.updates)
    assert [one.worker for one in rule.accepted] == [worker for update in workers.updates for worker in update]
    assert [one.step for one in rule.accepted] == [step for step, update in enumerate(workers.updates) for _ in update]
    if wanted >= number:
        assert not workers.dropped
    pending = workers.sent - workers.used - workers.dropped
    assert pending.total() < wanted


CONSISTENCIES = [
    *(Consistency(staleness=n) for n in (1, 3)),
    *(Consistency(replicas_to_aggregate=n) for n in (1, 2, 7)),
]


@given(
    schedule=st.lists(
        st.tuples(st.sampled_from(["send", "send", "stop", "lose"]), st.integers(0, 10**6)), max_size=300
    ),
    number=st.integers(1, 5),
    consistency=st.sampled_from(CONSISTENCIES),
)
def test_who_stops_for_a_meeting_or_is_lost_is_waited_for_by_nobody(schedule, number, consistency):
    workers = Workers(rule_of(consistency, range(number)), number)
    for event, choice in schedule:
        if event == "lose":
            there = workers.computing | workers.paused | workers.waiting
            if len(there) > 1:
                workers.lose(sorted(there)[choice % len(there)])
        else:
            (workers.meet if event == "stop" else workers.send)(choice)
        if workers.paused and not workers.computing | workers.waiting:
            workers.computing, workers.paused = workers.paused, set()
        assert workers.computing, f"{workers.waiting} wait for {workers.paused}"


v1 = tf.compat.v1


class Accumulating:
    """What TensorFlow's SyncReplicasOptimizer is made of: its accumulator and its queue, driven from one thread."""

    def __init__(self, workers: int, wanted: int, first_tokens: int):
        self.workers, self.wanted = workers, wanted
        self.steps, self.taken = 0, [0] * workers
        self.waiting: list[int] = []
        self.accumulator = v1.ConditionalAccumulator(tf.float64, shape=[workers])
        self.queue = tf.queue.FIFOQueue(-1, tf.int64, shapes=())
        self.sender, self.step = v1.placeholder(tf.int64, []), v1.placeholder(tf.int64, [])
        self.number = v1.placeholder(tf.int32, [])
        self.apply = self.accumulator.apply_grad(tf.one_hot(self.sender, workers, dtype=tf.float64), self.step)
        self.count, self.take = self.accumulator.num_accumulated(), self.accumulator.take_grad(wanted)
        self.put = self.queue.enqueue_many((tf.fill([self.number], self.step),))
        self.get, self.size = self.queue.dequeue(), self.queue.size()
        self.session = v1.Session()
        self.session.run(self.accumulator.set_global_step(0))
        self.session.run(self.put, {self.number: first_tokens, self.step: 0})

    def arrived(self, worker: int) -> tuple[list[float] | None, list[int]]:
        """The average that becomes an update, and the workers that go on."""
        run = self.session.run
        run(self.apply, {self.sender: worker, self.step: self.taken[worker]})
        self.waiting.append(worker)
        average = None
        if run(self.count) >= self.wanted:
            average = run(self.take).tolist()
            self.steps += 1
            run(self.accumulator.set_global_step(self.steps))
            run(self.put, {self.number: max(self.workers, self.wanted), self.step: self.steps})
        answered = []
        while self.waiting and run(self.size):
            answered.append(self.waiting.pop(0))
            self.taken[answered[-1]] = int(run(self.get))
        return average, answered


@pytest.mark.parametrize(
    ("workers", "wanted", "first_tokens"), [(3, 2, 2), (3, 2, 0), (3, 3, 3), (2, 5, 3), (2, 5, 5), (4, 1, 1), (1, 2, 1)]
)
def test_tokens_are_those_of_tensorflows_sync_replicas_optimizer(workers, wanted, first_tokens):
    with tf.Graph().as_default():
        theirs, ours = Accumulating(workers, wanted, first_tokens), Tokens(range(workers), wanted, first_tokens)
        rng = np.random.default_rng(workers * 100 + wanted * 10 + first_tokens)
        computing = set(range(workers))
        dropped = 0
        for _ in range(60):
            worker = int(rng.choice(sorted(computing)))
            computing.remove(worker)
            decision = ours.arrived(worker)
            average, answered = theirs.arrived(worker)
            joined = np.bincount(decision.joined, minlength=workers) / max(1, len(decision.joined))
            assert (average is None) == (not decision.joined)
            assert average is None or np.allclose(joined, average)
            assert list(decision.answered) == answered
            dropped += len(decision.dropped)
            computing.update(answered)
        theirs.session.close()
        assert sum(ours.dropped.values()) == dropped
        assert len(ours.accepted) + dropped + len(ours._here) == 60


@given(schedule=schedules, number=st.integers(1, 4), wanted=st.integers(1, 6), first=st.integers(0, 4))
def test_workers_with_tokens_never_all_wait(schedule, number, wanted, first):
    """Whoever pauses, or is lost."""
    workers = Workers(Tokens(range(number), wanted, first), number)
    for choice in schedule:
        if not workers.computing:
            assert workers.paused or not workers.waiting
            break
        kind = choice // 7 % 9
        if kind == 0:
            workers.meet(choice)
        elif kind == 1 and len(workers.computing) > 1:
            workers.lose(sorted(workers.computing)[choice % len(workers.computing)])
        else:
            workers.send(choice)
        if not workers.computing and not workers.paused:
            assert not workers.waiting, "all wait"
        if not workers.computing and workers.paused:
            assert not workers.waiting, "who has not paused waits for ever"
            workers.computing, workers.paused = workers.paused, set()
