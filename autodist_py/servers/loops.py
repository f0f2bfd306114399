"""Parameter servers at work: the thread by which this worker serves, and the one that carries its messages to others.

The step of a worker puts its message into a queue of its own process, and takes the answer from another. On a server,
a thread takes the messages, runs the update when the rule of the consistency says so, and puts the answers into queues.
Each message rings a bell there: it says whose message, of which exchange, is to be taken. Between processes a session
carries what is in the queues: the eager context cannot reach another task, and a session can.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.cluster.cluster import Cluster
from autodist_py.cluster.exit_hooks import TensorFlowThread, one_line
from autodist_py.cluster.exit_stack import Ending, at_exit
from autodist_py.cluster.tf_adapter import task_device
from autodist_py.kernel.exchange.queues import LOST, PAUSED, RUNG, named_queue
from autodist_py.kernel.pipeline import CompiledProgram
from autodist_py.kernel.program import Channel, ServerFunction, ServerProgram
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.synchronizers import Consistency
from autodist_py.servers.queues import HOST, Queue, session_between
from autodist_py.servers.store import ServerStore
from autodist_py.servers.update_rules import AfterOwn, AsTheyArrive, Decision, Rule, rule_of

Run = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]
"""A server function: of what it takes, to what it gives."""

_END_SECONDS = 5.0
_CLOSED = (tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.OutOfRangeError, tf.errors.UnavailableError)
"""What the carrier's session raises when a server of another process has closed or ended: that one tells the cause."""


class Messages:
    """The threads and queues of one program, from its making until it is closed."""

    def __init__(
        self,
        cluster: Cluster,
        program: CompiledProgram,
        function: Callable[[ServerFunction], Run],
        held: ServerStore,
    ):
        """Begin to serve, and to carry messages.

        Args:
            cluster: the workers.
            program: whose channels and servers these are.
            function: makes a server function callable.
            held: the variables that live on this worker.
        """
        self.error: Exception | None = None
        """What went wrong here; its effect elsewhere is that queues are closed."""
        self._cluster, self._closed = cluster, threading.Event()
        self._consistency = program.consistency
        rank, workers = cluster.rank, range(cluster.num_workers)
        with tf_adapter.eagerly(), tf.device(HOST):
            own = [channel for channel in program.channels if channel.server == rank]
            self._bell = Queue(own[0].bell, RUNG) if own else None
            self._server = _Server(program.servers, function, workers, rank, program.consistency, held)
            remote = [channel for channel in program.channels if channel.server != rank]
            carried = [
                Queue(name, types)
                for channel in remote
                for name, types in (
                    (channel.push(rank), channel.sent.types),
                    (channel.answer(rank), channel.answered.types),
                )
            ]
        self._queues = [*carried, *self._server.queues, *([self._bell] if self._bell else ())]
        # Every worker's queues are there before anybody sends.
        cluster.barrier(f"{program.channels[0].name}/queues")
        self._threads: list[threading.Thread] = []
        self._forget = cluster.on_failure(lambda cause: self.close())
        self._forget_losses = cluster.on_loss(lambda worker: self._ring(worker, LOST))
        self._forget_exit = at_exit(Ending.MESSAGES, self._end)
        if self._bell is not None:
            bell = self._bell
            self._start("serve", lambda: self._server.serve(bell))
        self._carrier = _Carrier(remote, rank) if remote else None
        if self._carrier is not None:
            self._start("carry", self._carrier.carry, told_elsewhere=_CLOSED)

    @property
    def rules(self) -> Sequence[Rule]:
        """By which this worker, as a server, makes its updates."""
        return self._server.rules

    @property
    def is_closed(self) -> bool:
        """Whether nothing is sent or served any more."""
        return self._closed.is_set()

    def pause(self) -> None:
        """This worker sends nothing for now: servers do not let others wait for it."""
        if self._consistency.is_bsp or self.is_closed:
            return
        self._ring(self._cluster.rank, PAUSED)
        if self._carrier is not None:
            with self._telling():
                self._carrier.pause()

    def _ring(self, worker: int, number: int) -> None:
        if self._bell is not None and not self.is_closed:
            with self._telling(), tf_adapter.eagerly(), tf.device(HOST):
                self._bell.put([tf.constant([worker, number], tf.int64)])

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What is told while queues are being closed, here, or elsewhere by the run's failure, is told to nobody."""
        try:
            yield
        except (tf.errors.OpError, RuntimeError):  # A closed session's is a RuntimeError.
            if not self.is_closed and self._cluster.failure() is None:
                raise

    def close_with(self, owner: object) -> None:
        """Close when nobody has `owner` any more."""
        weakref.finalize(owner, self.close).atexit = False

    def close(self) -> None:
        """End the threads, and whatever waits for a message or an answer."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._forget()
        self._forget_losses()
        with tf_adapter.eagerly(), tf.device(HOST):
            for queue in self._queues:
                queue.close()
        self._join()

    def _end(self) -> None:
        """At exit, whoever has closed: a session that closes while the interpreter ends would crash the process."""
        if self.is_closed:
            self._join()
        else:
            self.close()

    def _join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_END_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            self._forget_exit()

    def _start(
        self, name: str, work: Callable[[], None], *, told_elsewhere: tuple[type[tf.errors.OpError], ...] = ()
    ) -> None:
        """A thread for `work`. What it raises fails the run, unless another worker tells of it."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                if self._closed.is_set():
                    return
                self.error = error
                if not isinstance(error, told_elsewhere):
                    self._cluster.abort(one_line(error))
                self.close()

        thread = TensorFlowThread(run, f"autodist-{name}")
        self._threads.append(thread)
        thread.start()


class _Exchange:
    """One exchange of this server: its messages, and what was made of them."""

    def __init__(
        self, program: ServerProgram, function: Callable[[ServerFunction], Run], workers: Sequence[int], rule: Rule
    ):
        channel = program.channel
        self.program, self.rule = program, rule
        self.update, self.answer = function(program.update), function(program.answer)
        self.pushes = {worker: Queue(channel.push(worker), channel.sent.types) for worker in workers}
        self.answers = {worker: Queue(channel.answer(worker), channel.answered.types) for worker in workers}
        self.messages: dict[int, deque[list[tf.Tensor]]] = {worker: deque() for worker in workers}
        self.last: dict[str, tf.Tensor] = {}
        """What the last update gave."""


class _Server:
    """What this worker does for the others, and for itself."""

    def __init__(
        self,
        programs: Sequence[ServerProgram],
        function: Callable[[ServerFunction], Run],
        workers: Sequence[int],
        rank: int,
        consistency: Consistency,
        held: ServerStore,
    ):
        updates = [program for program in programs if not program.each]
        self.rules: Sequence[Rule] = [
            _rule(consistency, workers, rank, each=program.each, is_last=bool(updates) and program is updates[-1])
            for program in programs
        ]
        self._exchanges = [
            _Exchange(program, function, workers, rule) for program, rule in zip(programs, self.rules, strict=True)
        ]
        self._rank, self._held = rank, held
        self._kept: dict[int, dict[str, tf.Tensor]] = {worker: {} for worker in workers}
        """For each worker, what the exchanges of its step have kept."""

    @property
    def queues(self) -> list[Queue]:
        """All queues of its messages and answers."""
        return [
            queue for exchange in self._exchanges for queue in (*exchange.pushes.values(), *exchange.answers.values())
        ]

    def serve(self, bell: Queue) -> None:
        """Message after message, until the queues are closed."""
        lost: set[int] = set()
        with tf_adapter.eagerly(), tf.device(HOST):
            while True:
                worker, number = map(int, bell.take()[0].numpy())
                if worker in lost:
                    continue  # What it sent before its end came late.
                if number in (PAUSED, LOST):
                    if number == LOST:
                        lost.add(worker)
                    for exchange in self._exchanges:
                        rule = exchange.rule
                        self._do(exchange, rule.paused(worker) if number == PAUSED else rule.lost(worker))
                    continue
                exchange = self._exchanges[number]
                if number == 0:
                    self._kept[worker] = {}  # A step begins.
                exchange.messages[worker].append(exchange.pushes[worker].take())
                self._do(exchange, exchange.rule.arrived(worker))

    def _do(self, exchange: _Exchange, decision: Decision) -> None:
        if decision == Decision():
            return
        for worker in decision.dropped:
            exchange.messages[worker].popleft()
            self._kept[worker] = self._kept[worker] | exchange.last
        try:
            changes = decision.joined and not exchange.program.each
            with self._held.updating() if changes else self._held.steady():
                if decision.joined:
                    self._update(exchange, decision.joined)
                distinct = _distinct(self._kept, decision.answered)
                answers = {worker: self._answer(exchange, worker) for worker in distinct}
        except tf.errors.OpError as error:
            raise _explained(error, exchange.program, decision) from error
        made = {id(self._kept[worker]): answer for worker, answer in answers.items()}
        # Its own last: when this worker has its answer, and may close, the others have theirs.
        for worker in sorted(decision.answered, key=lambda worker: worker == self._rank):
            exchange.answers[worker].put(made[id(self._kept[worker])])

    def _update(self, exchange: _Exchange, joined: Sequence[int]) -> None:
        messages = [exchange.messages[worker].popleft() for worker in joined]
        missing = exchange.program.num_messages - len(messages)
        messages += [exchange.program.channel.sent.nothing(messages[0]) for _ in range(missing)]
        components = [component for message in messages for component in message]
        earlier = self._kept[joined[0]]
        results = exchange.update([*components, *(earlier[name] for name in exchange.program.taken)])
        exchange.last = dict(zip(exchange.program.kept, results, strict=True))
        kept = earlier | exchange.last
        self._kept |= dict.fromkeys(joined, kept)

    def _answer(self, exchange: _Exchange, worker: int) -> list[tf.Tensor]:
        return exchange.answer([self._kept[worker][spec.name] for spec in exchange.program.answer.takes])


def _rule(consistency: Consistency, workers: Sequence[int], rank: int, *, each: bool, is_last: bool) -> Rule:
    """The rule of one exchange of a step."""
    if consistency.is_bsp:
        return AfterOwn(workers, rank) if each else rule_of(consistency, workers)
    return rule_of(consistency, workers) if is_last else AsTheyArrive()


def _explained(error: tf.errors.OpError, program: ServerProgram, decision: Decision) -> ClusterError:
    senders = ", ".join(map(str, dict.fromkeys((*decision.joined, *decision.answered))))
    names = [spec.name for spec in (*program.channel.answered.tensors, *program.channel.sent.tensors) if spec.name]
    return ClusterError(
        f"a server cannot use what it was sent by worker {senders} (for {', '.join(names[:4])}): "
        f"{one_line(error)}. Look at what the step gave there: an index beyond a table, say"
    )


def _distinct(kept: Mapping[int, object], workers: Sequence[int]) -> list[int]:
    """One of the workers for each thing that is kept for them."""
    return list({id(kept[worker]): worker for worker in workers}.values())


class _Carrier:
    """Carries this worker's messages to servers of other processes, and their answers back."""

    def __init__(self, channels: Sequence[Channel], rank: int):
        own = task_device(rank)
        with tf.Graph().as_default() as graph:
            done = [_carry(channel, rank, own) for channel in channels]
            step = tf.group(*done)
            pause = tf.group(
                *(_ring(channel, rank, PAUSED) for channel in {one.server: one for one in channels}.values())
            )
        self._session = session_between([rank, *(channel.server for channel in channels)], graph)
        self._step = self._session.make_callable(step)
        self.pause: Callable[[], None] = self._session.make_callable(pause)
        """Tell the servers that this worker sends nothing for now."""

    def carry(self) -> None:
        """Step after step, until the queues are closed."""
        try:
            while True:
                self._step()
        finally:
            self._session.close()


def _carry(channel: Channel, rank: int, own: str) -> tf.Operation:
    pushes, answers = channel.push(rank), channel.answer(rank)
    sent, answered = list(channel.sent.types), list(channel.answered.types)
    with tf.device(own):
        message = tf.raw_ops.QueueDequeueV2(handle=named_queue(pushes, sent), component_types=sent)
    with tf.device(task_device(channel.server)):
        enqueue = tf.raw_ops.QueueEnqueueV2(handle=named_queue(pushes, sent), components=message)
    with tf.control_dependencies([enqueue]):
        rung = _ring(channel, rank, channel.number)
    with tf.device(task_device(channel.server)), tf.control_dependencies([rung]):
        answer = tf.raw_ops.QueueDequeueV2(handle=named_queue(answers, answered), component_types=answered)
    with tf.device(own):
        return tf.raw_ops.QueueEnqueueV2(handle=named_queue(answers, answered), components=answer)


def _ring(channel: Channel, rank: int, number: int) -> tf.Operation:
    with tf.device(task_device(channel.server)):
        rung = tf.constant([rank, number], tf.int64)
        return tf.raw_ops.QueueEnqueueV2(handle=named_queue(channel.bell, RUNG), components=[rung])
