"""The gRPC side of the coordinator, on both ends: `serve` on the chief, `CoordinatorClient` on every other worker."""

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import grpc

from autodist_py.cluster.coordinator.api import HeartbeatReply, Membership
from autodist_py.cluster.coordinator.shell import Coordinator
from autodist_py.cluster.ports import host_and_port
from autodist_py.cluster.server_probe import ask_seconds
from autodist_py.cluster.step_status import NO_STATUS, STOPPING_SECONDS, StepStatus
from autodist_py.proto import coordinator_pb2 as pb
from autodist_py.proto import coordinator_pb2_grpc as pb_grpc
from autodist_py.proto.checks import require_seconds
from autodist_py.proto.errors import AutoDistError, ClusterError, WorkerFailedError

_log = logging.getLogger(__name__)

_SECRET_KEY = "autodist-secret"
_PIECE_BYTES = 1 << 20
"""Of a value that is exchanged: gRPC's own limit on a message, 4 MiB, holds for all calls."""
_REFUSALS_EVERY_SECONDS = 60.0
_TRIES_OFTEN = tuple((f"grpc.{which}_reconnect_backoff_ms", 1000) for which in ("initial", "min", "max"))
"""Who comes before the chief joins soon after it has come."""
_CALLS_AT_ONCE = 3
"""Of each worker: a heartbeat, what its script waits for, and what another of its threads hears."""
REPLY_SECONDS = 10.0


class ChiefLostError(ClusterError):
    """The coordinator does not answer: the chief's process has ended, stands still, or cannot be reached."""


class ChiefSilentError(ChiefLostError):
    """The coordinator has not answered in time, and nothing says that it cannot be reached."""


# -- The chief's end --------------------------------------------------------------------------------------------------


def serve(coordinator: Coordinator, secret: str, *, host: str, port: int) -> tuple[grpc.Server, int]:
    """A running server on `host`, and its port. Port 0: any free one, as the server itself binds it.

    Raises:
        ClusterError: the port is in use, or the host is no address of this machine.
    """
    server = grpc.server(
        _DaemonThreads(_CALLS_AT_ONCE * coordinator.num_workers),
        interceptors=[_RequireSecret(secret)],
        options=[("grpc.so_reuseport", 0)],
    )
    pb_grpc.add_CoordinatorServicer_to_server(_Service(coordinator), server)
    try:
        bound = server.add_insecure_port(host_and_port(host, port))
    except RuntimeError as error:
        raise ClusterError(
            f"the chief's coordinator cannot listen on {host}:{port}: the port is in use, or {host} is no address of "
            "this machine. Choose another AUTODIST_COORDINATOR_PORT (0: any free one)."
        ) from error
    server.start()
    return server, int(bound)


class _DaemonThreads(futures.ThreadPoolExecutor):
    """A daemon thread per call, of which some are ready.

    Calls wait for other workers, so a pool of fixed size could fill up with them; and the interpreter shuts pools of
    `concurrent.futures` down before `atexit`, where workers still have to leave. There Python 3.12 starts no thread, so
    what workers call at the end finds one that is ready. The threads live as long as the process, which has one pool.
    """

    def __init__(self, num_ready: int) -> None:
        super().__init__()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_ready = threading.Semaphore(0)
        for _ in range(num_ready):
            self._start(is_ready=True)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def call() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        if not self._num_ready.acquire(blocking=False):
            self._start(is_ready=False)
        self._calls.put(call)
        return future

    def _start(self, *, is_ready: bool) -> None:
        def work() -> None:
            while True:
                self._calls.get()()
                self._num_ready.release()

        threading.Thread(target=work, name="autodist-call", daemon=True).start()
        if is_ready:
            self._num_ready.release()


class _RequireSecret(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Refuses every call that does not carry the run's secret, before its message is read."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._lock = threading.Lock()
        self._refused = 0
        self._logged: float | None = None

        def refuse(_: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this call does not carry the run's secret")

        # Of a stream of requests none is received until it is asked for; a single request would be, whatever its size.
        self._refusal: Any = grpc.stream_unary_rpc_method_handler(refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        for key, value in handler_call_details.invocation_metadata:
            if key == _SECRET_KEY and hmac.compare_digest(str(value).encode(), self._secret):
                return continuation(handler_call_details)
        self._note_refusal(str(handler_call_details.method))
        return self._refusal

    def _note_refusal(self, method: str) -> None:
        """One line a minute, with the number of calls since the last one."""
        with self._lock:
            self._refused += 1
            now = time.monotonic()
            if self._logged is not None and now - self._logged < _REFUSALS_EVERY_SECONDS:
                return
            count, self._refused, self._logged = self._refused, 0, now
        _log.warning("refused %d calls without the run's secret; the last one: %.100r", count, method)


def _require_sound(request: Any) -> None:
    """Refuse numbers that no worker of ours sends: one that nobody can wait for would be waited for.

    Raises:
        ClusterError: the field, and its value.
    """
    fields = request.DESCRIPTOR.fields_by_name
    for name in ("timeout_seconds", "limit_seconds"):
        if name in fields:
            require_seconds(getattr(request, name), f"{name} of a {request.DESCRIPTOR.name}", error=ClusterError)
    if "position" in fields and request.position < 0:
        raise ClusterError(f"position of a {request.DESCRIPTOR.name} must be an integer >= 0; got {request.position}")


class _Service(pb_grpc.CoordinatorServicer):  # type: ignore[misc, unused-ignore]
    """Messages to values and back. A call that its client cancels, or whose deadline is over, is given up."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        with _errors_as_status(context):
            _require_sound(request)
            membership = self._coordinator.join(
                request.rank,
                request.server,
                spec=request.spec,
                timeout=request.timeout_seconds,
                caller=context,
            )
        return pb.JoinReply(run_id=membership.run_id, seed=membership.seed, servers=membership.servers)

    def Exchange(
        self, requests: Iterator[pb.ExchangeRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ExchangeReply]:
        with _errors_as_status(context):
            first = next(requests, None)
            if first is None:
                raise ClusterError("an exchange has a request; received none")
            _require_sound(first)
            values = self._coordinator.exchange(
                first.rank,
                first.key,
                value=b"".join([first.value, *(request.value for request in requests)]),
                everyone=first.kind == pb.ExchangeRequest.ALL,
                timeout=first.timeout_seconds,
                caller=context,
            )
        for rank, value in values.items():
            for piece in _pieces(value):
                yield pb.ExchangeReply(values={rank: piece})

    def Hear(self, request: pb.HearRequest, context: grpc.ServicerContext) -> pb.HearReply:
        with _errors_as_status(context):
            _require_sound(request)
            value = self._coordinator.hear(
                request.rank,
                request.key,
                step=request.step,
                position=request.position,
                timeout=request.timeout_seconds,
                caller=context,
            )
        return pb.HearReply(announced=value is not None, value=value or b"")

    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:
        with _errors_as_status(context):
            _require_sound(request)
            waits = StepStatus(request.step_together, request.limit_seconds, request.waits_in, request.stopped_in)
            reply = self._coordinator.heartbeat(request.rank, request.step, waits, caller=context)
        return pb.HeartbeatReply(
            cause=reply.cause or "", finished=reply.finished, lost=reply.lost, suspicion=reply.suspicion or ""
        )

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortReply:
        with _errors_as_status(context):
            cause = self._coordinator.abort(
                request.rank, request.event, detail=request.detail, step=request.step, caller=context
            )
        return pb.AbortReply(cause=cause)

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        with _errors_as_status(context):
            self._coordinator.leave(request.rank, request.step, caller=context)
        return pb.LeaveReply()


def _pieces(value: bytes) -> list[bytes]:
    """`value` in pieces that each fit into a message, one at least."""
    return [value[begin : begin + _PIECE_BYTES] for begin in range(0, max(len(value), 1), _PIECE_BYTES)]


@contextmanager
def _errors_as_status(context: grpc.ServicerContext) -> Iterator[None]:
    try:
        yield
    except WorkerFailedError as error:
        context.abort(grpc.StatusCode.ABORTED, str(error))
    except AutoDistError as error:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


# -- The other workers' end -------------------------------------------------------------------------------------------


class CoordinatorClient:
    """The coordinator at `address`, called over gRPC. It implements CoordinatorCalls.

    Each call also raises ChiefLostError when the chief does not answer. Who joins also waits for the chief to be there
    where it `awaits_chief`.
    """

    def __init__(self, address: str, secret: str, *, heartbeat_timeout: float, awaits_chief: bool = False) -> None:
        self._channel = grpc.insecure_channel(address, options=[*_TRIES_OFTEN, ("grpc.enable_http_proxy", 0)])
        self._stub = pb_grpc.CoordinatorStub(self._channel)
        self._metadata = ((_SECRET_KEY, secret),)
        self._address = address
        self._heartbeat_timeout = heartbeat_timeout
        self._awaits_chief = awaits_chief

    def join(self, rank: int, server: str, *, spec: str, timeout: float) -> Membership:
        """See CoordinatorCalls."""
        request = pb.JoinRequest(rank=rank, server=server, spec=spec, timeout_seconds=timeout)
        reply = self._call(self._stub.Join, request, timeout + REPLY_SECONDS, wait_for_ready=self._awaits_chief)
        return Membership(reply.run_id, reply.seed, tuple(reply.servers))

    def exchange(self, rank: int, key: str, *, value: bytes, everyone: bool, timeout: float) -> dict[int, bytes]:
        """See CoordinatorCalls."""
        first, *rest = _pieces(value)
        kind = pb.ExchangeRequest.ALL if everyone else pb.ExchangeRequest.CHIEF
        request = pb.ExchangeRequest(rank=rank, key=key, kind=kind, value=first, timeout_seconds=timeout)
        requests = iter([request, *(pb.ExchangeRequest(value=piece) for piece in rest)])
        pieces: dict[int, list[bytes]] = {}
        for reply in self._call(self._exchanged, requests, timeout + REPLY_SECONDS):
            for each, piece in reply.values.items():
                pieces.setdefault(each, []).append(piece)
        return {each: b"".join(pieces[each]) for each in sorted(pieces)}

    def _exchanged(self, requests: Iterator[pb.ExchangeRequest], **options: Any) -> list[pb.ExchangeReply]:
        """All replies; errors are raised as these are read."""
        return list(self._stub.Exchange(requests, **options))

    def hear(self, rank: int, key: str, *, step: int, position: int, timeout: float) -> bytes | None:
        """See CoordinatorCalls. It has no deadline: `timeout` does not count while the chief prepares what it says."""
        request = pb.HearRequest(rank=rank, key=key, step=step, position=position, timeout_seconds=timeout)
        reply = self._call(self._stub.Hear, request, None)
        return bytes(reply.value) if reply.announced else None

    def heartbeat(self, rank: int, step: int, waits: StepStatus = NO_STATUS) -> HeartbeatReply:
        """See CoordinatorCalls. It leaves time for asking, within the timeout, whether a silent chief lives."""
        request = pb.HeartbeatRequest(
            rank=rank,
            step=step,
            step_together=waits.step,
            limit_seconds=waits.seconds,
            waits_in=waits.what,
            stopped_in=waits.stopped_in,
        )
        patience = self._heartbeat_timeout - ask_seconds(self._heartbeat_timeout)
        reply = self._call(self._stub.Heartbeat, request, patience)
        return HeartbeatReply(reply.cause or None, reply.finished, tuple(reply.lost), reply.suspicion or None)

    def abort(self, rank: int, event: str, *, detail: str, step: int) -> str:
        """See CoordinatorCalls. The answer may wait for what others say of a worker that is missing."""
        request = pb.AbortRequest(rank=rank, event=event, detail=detail, step=step)
        return str(self._call(self._stub.Abort, request, self._heartbeat_timeout + STOPPING_SECONDS).cause)

    def leave(self, rank: int, step: int) -> None:
        """See CoordinatorCalls. It may take as long as the slowest worker, so it has no deadline."""
        self._call(self._stub.Leave, pb.LeaveRequest(rank=rank, step=step), None)

    def close(self) -> None:
        """No call can be made any more; those that wait end with ChiefLostError."""
        self._channel.close()

    def _call(
        self, method: Callable[..., Any], request: object, timeout: float | None, *, wait_for_ready: bool = False
    ) -> Any:
        try:
            return method(request, timeout=timeout, metadata=self._metadata, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            raise self._as_error(error) from error
        except ValueError as error:  # What grpc says of a channel that was closed.
            raise ChiefLostError(f"the coordinator at {self._address} is given up: {error}") from error

    def _as_error(self, error: Any) -> AutoDistError:
        code, message = error.code(), str(error.details())
        if code is grpc.StatusCode.ABORTED:
            return WorkerFailedError(message)
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return ClusterError(message)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return ClusterError(
                f"the coordinator at {self._address} refused this worker: {message}. Workers are started by the chief, "
                "which gives them the secret on their standard input; where workers are started by hand, each process "
                "is given the same. Where TF_CONFIG names the workers, all have the same list of addresses in it."
            )
        kind = ChiefSilentError if code is grpc.StatusCode.DEADLINE_EXCEEDED else ChiefLostError
        return kind(f"the coordinator at {self._address} does not answer ({code.name}: {message})")
