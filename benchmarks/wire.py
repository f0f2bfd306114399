"""What a link carries: two processes send each other bytes over TCP, both ways at once.

Each prints the bytes a second that it received, in JSON.

Usage: python -m benchmarks.wire RANK PORT SECONDS ADDRESS_OF_RANK_0
"""

import socket
import sys
import threading
import time

_CHUNK = 1 << 18
_CONNECT_SECONDS = 20.0


def connection(rank: int, port: int, address: str) -> socket.socket:
    if rank == 0:
        with socket.create_server((address, port)) as server:
            server.settimeout(_CONNECT_SECONDS)
            return server.accept()[0]
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def received_per_second(peer: socket.socket, seconds: float) -> float:
    """Of the second half of the time: by then the link's queue is full."""
    started = time.monotonic()
    threading.Thread(target=_send, args=(peer, started + seconds), daemon=True).start()
    buffer, received, since = bytearray(_CHUNK), 0, 0.0
    while (now := time.monotonic()) < started + seconds:
        size = peer.recv_into(buffer)
        if not size:
            break
        if since:
            received += size
        elif now > started + seconds / 2:
            since = time.monotonic()
    return received / (time.monotonic() - since)


def _send(peer: socket.socket, until: float) -> None:
    chunk = bytes(_CHUNK)
    while time.monotonic() < until:
        peer.sendall(chunk)
    peer.shutdown(socket.SHUT_WR)


def main() -> None:
    rank, port, seconds, address = sys.argv[1:]
    with connection(int(rank), int(port), address) as peer:
        print(received_per_second(peer, float(seconds)))


if __name__ == "__main__":
    main()
