"""A port that is held for TensorFlow's server from the moment it is announced until the server listens on it.

TensorFlow binds a server's port only once the whole cluster is known, and then cannot tell which free port it took. So
the process binds a free port by itself with SO_REUSEPORT, without listening, and TensorFlow binds the same one.
"""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from autodist_py.proto.errors import ClusterError

_REUSE_VARIABLE = "TF_GRPC_REUSE_PORT"


class HeldPort:
    """Port `port` of every address of this machine (0: a free one), bound by this process; `number` says which.

    Raises:
        ClusterError: the port is in use.
    """

    def __init__(self, port: int = 0) -> None:
        try:
            if port:
                _bound(port, shared=False).close()  # Another server's SO_REUSEPORT would let us in, to share its calls.
            self._socket = _bound(port, shared=True)
        except OSError as error:
            raise ClusterError(
                f"TensorFlow's server cannot have port {port}: {errno.errorcode.get(error.errno or 0, 'error')}, "
                f"{error.strerror}. End what uses it, or choose another AUTODIST_SERVER_PORT (0: any free one)."
            ) from error
        self.number = int(self._socket.getsockname()[1])

    @contextmanager
    def shared_with_server(self) -> Iterator[None]:
        """TensorFlow's server may bind the port inside the context; afterwards it is the server's alone."""
        before = os.environ.get(_REUSE_VARIABLE)
        os.environ[_REUSE_VARIABLE] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_REUSE_VARIABLE]
            else:
                os.environ[_REUSE_VARIABLE] = before
            self.release()

    def release(self) -> None:
        """The port is not held any more."""
        self._socket.close()


def host_and_port(address: str, port: int) -> str:
    """What gRPC and TensorFlow take for the port at an address or host name."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def require_own_address(address: str) -> None:
    """Other machines are told this address of ours.

    Raises:
        ClusterError: it is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise _not_ours(address, str(error.strerror)) from error
    errors = [reason for family, *_, topology in found if (reason := bind_error(family, topology[0]))]
    if len(errors) == len(found):
        raise _not_ours(address, errors[0])


def bind_error(family: int, host: str | int) -> str:
    """Why no port can be bound at an address, of a socket family, of this machine; "": one can."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return str(error.strerror)
    return ""


def _not_ours(address: str, reason: str) -> ClusterError:
    return ClusterError(
        f"the script is started on the machine of the chief. Received: a resource spec whose chief is {address}, which "
        f"is no address of this machine ({reason}). Start it there, or give the chief the address by which this "
        "machine knows itself."
    )


def _bound(port: int, *, shared: bool) -> socket.socket:
    """A socket on the port, for IPv6 and IPv4 alike, as TensorFlow listens; IPv4 only where there is no IPv6."""
    try:
        return _bind(socket.socket(socket.AF_INET6), "::", port, shared=shared)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
    return _bind(socket.socket(socket.AF_INET), "0.0.0.0", port, shared=shared)


def _bind(bound: socket.socket, host: str, port: int, *, shared: bool) -> socket.socket:
    try:
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
