"""`Told`: what the chief tells a worker over its standard input, on one line: the run's secret, its address, its spec.

So no process list, environment or log shows the secret, no other machine needs the spec's file, and a worker may start
before the chief listens. A worker that is started by hand is told the secret alone.
"""

import base64
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from autodist_py.config.settings import LAUNCH_VARIABLE, RANK_VARIABLE
from autodist_py.proto import resourcespec_pb2 as pb
from autodist_py.proto import wire
from autodist_py.proto.errors import ClusterError, ResourceSpecError
from autodist_py.proto.resource_spec import ResourceSpec

_SEPARATOR = "\t"
"""It is in no secret, which has printable characters alone."""
_MOST_BYTES = 1 << 24
"""The line has no more, nor the spec that is compressed in it."""
_MOST_CHARACTERS = 1024
"""A secret has no more: it is sent with each call."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker is told.

    Attributes:
        secret: the run's.
        coordinator: where the chief's coordinator listens, as `host:port`; "": the worker's environment says it.
        resources: the run's spec; None: the worker reads its own.
    """

    secret: str
    coordinator: str = ""
    resources: ResourceSpec | None = None

    def line(self) -> bytes:
        """What `from_input` reads. The spec is compressed: a pipe takes 64 kB while nobody reads."""
        words = [self.secret]
        if self.coordinator or self.resources is not None:
            words.append(self.coordinator)
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
            while len(line) < _MOST_BYTES and (byte := os.read(0, 1)) not in (b"", b"\n"):
                line += byte
        return cls.parse(bytes(line))

    @classmethod
    def parse(cls, line: bytes) -> "Told":
        """What a line of `line()` says.

        Raises:
            ClusterError: the secret cannot be sent with a call, or what follows the address is no resource spec.
        """
        secret, _, rest = line.decode(errors="replace").strip().partition(_SEPARATOR)
        coordinator, _, resources = rest.partition(_SEPARATOR)
        if not secret or not secret.isascii() or not secret.isprintable() or len(secret) > _MOST_CHARACTERS:
            raise ClusterError(
                f"a process with {RANK_VARIABLE} set is a worker, and one with {LAUNCH_VARIABLE}=none is one of a run "
                "whose workers are started by hand. Each gets the run's secret as the first line of its standard "
                f"input, in ASCII. Received: {'another line' if secret else 'no line'}. To start a run that starts its "
                "workers by itself, unset both; in a worker's script, make AutoDist(...) before reading standard input."
            )
        if not resources:
            return cls(secret, coordinator)
        try:
            packed = base64.b64decode(resources, validate=True)
            return cls(secret, coordinator, ResourceSpec.from_proto(pb.ResourceSpec.FromString(_unpacked(packed))))
        except (ValueError, zlib.error, DecodeError, ResourceSpecError) as error:
            raise ClusterError(
                "the first line of a worker's standard input has the run's secret, the chief's address and the "
                f"resource spec, with tabs between. Received: {len(resources)} characters that are no spec ({error}). "
                "A worker that is started by hand gets the secret alone on that line"
            ) from error


def _unpacked(packed: bytes) -> bytes:
    """What was compressed, and is no larger than it may be."""
    reader = zlib.decompressobj()
    content = reader.decompress(packed, _MOST_BYTES)
    if not reader.eof or reader.unused_data:
        raise ValueError(f"it ends early, or late, or has more than {_MOST_BYTES} bytes")
    return content
