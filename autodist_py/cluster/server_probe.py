"""Whether a process lives whose Python stands still: its TensorFlow server is asked, which answers without Python.

A call into C++ that keeps Python's lock stops heartbeats, too. TensorFlow destroys an iterator so, for up to a minute.
"""

from typing import Any

import grpc

ASK_SECONDS = 1.0
"""How long the answer may take, at most; a server on an idle machine takes a millisecond."""

STILL_SECONDS = 120.0
"""How long a process whose Python stands still is waited for: twice as long as is known to happen."""

_METHOD = "/tensorflow.WorkerService/GetStatus"
"""Its request is an empty message."""


def ask_seconds(heartbeat_timeout: float) -> float:
    """The part of a heartbeat's timeout, in seconds, that is left for the question."""
    return min(ASK_SECONDS, heartbeat_timeout / 4)


def answers(server: str, seconds: float) -> bool:
    """Whether the TensorFlow server at host:port answers within so many seconds. One of a stopped process does not."""
    with grpc.insecure_channel(server, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask: Any = channel.unary_unary(_METHOD)
        try:
            ask(b"", timeout=seconds)
        except grpc.RpcError:
            return False
    return True
