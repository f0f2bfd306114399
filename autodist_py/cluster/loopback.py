"""Keeps other machines from a server of this process that listens on all addresses, as TensorFlow's does.

Whoever reaches TensorFlow's server can run ops on it, and so read and write files. It listens on all addresses,
whatever it is told. So where all workers are on this machine, its sockets get a filter, which every process may attach
to its own: packets that come from no loopback address are dropped, a connection's first one included.
"""

import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import addressof, create_string_buffer
from typing import NamedTuple

from autodist_py.proto.errors import ClusterError

_log = logging.getLogger(__name__)

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux, which Python's `socket` does not name.
_POLL_SECONDS = 0.002
_SECONDS = 10.0

_NETWORK = 0xFFF00000
"""SKF_NET_OFF: where the packet's IP header is."""
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06


class _Instruction(NamedTuple):
    """One of a classic BPF program: where a jump goes, it is by how many instructions."""

    code: int
    if_true: int
    if_false: int
    operand: int


FROM_LOOPBACK: tuple[_Instruction, ...] = (
    _Instruction(_LOAD_BYTE, 0, 0, _NETWORK),
    _Instruction(_SHIFT_RIGHT, 0, 0, 4),
    _Instruction(_JUMP_IF_EQUAL, 0, 2, 4),  # The IP version.
    _Instruction(_LOAD_BYTE, 0, 0, _NETWORK + 12),  # Of IPv4: the source's first byte.
    _Instruction(_JUMP_IF_EQUAL, 9, 8, 127),
    _Instruction(_LOAD_WORD, 0, 0, _NETWORK + 8),  # Of IPv6: the source's four words.
    _Instruction(_JUMP_IF_EQUAL, 0, 6, 0),
    _Instruction(_LOAD_WORD, 0, 0, _NETWORK + 12),
    _Instruction(_JUMP_IF_EQUAL, 0, 4, 0),
    _Instruction(_LOAD_WORD, 0, 0, _NETWORK + 16),
    _Instruction(_JUMP_IF_EQUAL, 0, 2, 0),
    _Instruction(_LOAD_WORD, 0, 0, _NETWORK + 20),
    _Instruction(_JUMP_IF_EQUAL, 1, 0, 1),
    _Instruction(_RETURN, 0, 0, 0),
    _Instruction(_RETURN, 0, 0, 0xFFFFFFFF),
)
"""Whether a packet comes from 127.0.0.0/8 or ::1. S. McCanne, V. Jacobson: The BSD Packet Filter, USENIX 1993."""


@contextmanager
def closed_to_others(port: int) -> Iterator[None]:
    """What this process starts within the context to listen on `port` is reached from loopback addresses only.

    A system that attaches no filter is warned of.

    Raises:
        ClusterError: nothing listens on the port at the end.
    """
    started = threading.Event()
    errors: list[OSError] = []

    def watch() -> None:
        while not started.wait(_POLL_SECONDS):
            try:
                if _close(port):
                    return
            except OSError as error:
                errors.append(error)
                return

    watching = threading.Thread(target=watch, name="autodist-loopback", daemon=True)
    watching.start()
    try:
        yield
    finally:
        started.set()
        watching.join(_SECONDS)
    try:
        found = _close(port)  # The others of several sockets, and who came in before the filter.
    except OSError as error:
        errors.append(error)
    if errors:
        _log.warning(
            "other machines can reach TensorFlow's server of this worker, at port %d, and run code by it: this system "
            "attaches no filter to its socket (%s). Use one worker with several devices (`cpus: [0, 1]`), which needs "
            "no server, or a firewall",
            port,
            errors[0],
        )
        return
    if not found:
        raise ClusterError(f"TensorFlow's server was to listen on port {port}; no socket of this process does")


def filter_others(listening: socket.socket) -> None:
    """Packets to `listening`, and to connections that it accepts, are dropped unless they come from this machine."""
    packed = b"".join(struct.pack("HBBI", *one) for one in FROM_LOOPBACK)
    code = create_string_buffer(packed, len(packed))
    program = struct.pack("HL", len(FROM_LOOPBACK), addressof(code))
    listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _close(port: int) -> bool:
    """Filters the sockets that listen on the port, and ends others' connections to it; whether there are any."""
    found = False
    for own in _sockets(port):
        if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            filter_others(own)
            found = True
    for own in _sockets(port) if found else ():
        if not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and not _is_from_here(own):
            with suppress(OSError):  # It has ended.
                own.shutdown(socket.SHUT_RDWR)
    return found


def _sockets(port: int) -> Iterator[socket.socket]:
    """The TCP sockets of this process at the port, each as a duplicate that is closed after its turn."""
    for name in os.listdir("/proc/self/fd"):
        duplicate = _duplicate(int(name))
        if duplicate is None:
            continue
        with duplicate:
            is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM
            if is_tcp and duplicate.getsockname()[1] == port:
                yield duplicate


def _duplicate(descriptor: int) -> socket.socket | None:
    """Of the socket that the descriptor is; None where it is none, or was closed meanwhile."""
    with suppress(OSError):
        copy = os.dup(descriptor)
        try:
            return socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
    return None


def _is_from_here(connection: socket.socket) -> bool:
    """Whether the peer's address is a loopback one; also where there is no peer."""
    try:
        host = str(connection.getpeername()[0])
    except OSError:
        return True
    return host == "::1" or host.removeprefix("::ffff:").startswith("127.")
