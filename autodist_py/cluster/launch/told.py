"""`Told`: what the chief tells a worker over its standard input, on one line: the run's secret, and its resource spec.

So no process list, environment or log shows the secret, and no other machine needs the spec's file. A worker that is
started by hand is told the secret alone.
"""

import base64
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass

from autodist_py.config.settings import LAUNCH_VARIABLE, RANK_VARIABLE
from autodist_py.proto import resourcespec_pb2 as pb
from autodist_py.proto import wire
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import ResourceSpec

_SEPARATOR = "\t"
"""It is in no secret, which has printable characters alone."""


@dataclass(frozen=True, slots=True)
class Told:
    """The run's secret, and its resource spec; None: the worker reads its own."""

    secret: str
    resources: ResourceSpec | None = None

    def line(self) -> bytes:
        """What `from_input` reads. The spec is compressed: a pipe takes 64 kB while nobody reads."""
        words = [self.secret]
        if self.resources is not None:
            words.append(base64.b64encode(zlib.compress(wire.to_bytes(self.resources.to_proto()))).decode())
        return f"{_SEPARATOR.join(words)}\n".encode()

    @classmethod
    def from_input(cls) -> "Told":
        """The first line of standard input, read without taking more.

        Raises:
            ClusterError: there is no line, or none that a call can carry.
        """
        line = bytearray()
        with suppress(OSError):
            while (byte := os.read(0, 1)) not in (b"", b"\n"):
                line += byte
        secret, _, resources = line.decode(errors="replace").strip().partition(_SEPARATOR)
        if not secret or not secret.isascii() or not secret.isprintable():
            raise ClusterError(
                f"a process with {RANK_VARIABLE} set is a worker, and one with {LAUNCH_VARIABLE}=none is one of a run "
                "whose workers are started by hand. Each gets the run's secret as the first line of its standard "
                f"input, in ASCII. Received: {'another line' if secret else 'no line'}. To start a run that starts its "
                "workers by itself, unset both; in a worker's script, make AutoDist(...) before reading standard input."
            )
        if not resources:
            return cls(secret)
        message = pb.ResourceSpec.FromString(zlib.decompress(base64.b64decode(resources)))
        return cls(secret, ResourceSpec.from_proto(message))
