"""Which ops belong to layers whose statistics are each replica's own, as `AutoDist(batch_statistics={...})` says.

A layer's ops have names in its scope, those of its back-propagation likewise, behind the tape's.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from autodist_py.proto.errors import CaptureError

_COUNTED = re.compile(r"_\d+(?=/|$)")
"""What Keras and TensorFlow add to a scope that there is already."""


def ops_of_replicas(names: Iterable[str], choices: Mapping[str, str]) -> frozenset[str]:
    """The ops whose first pattern in `choices` that names a scope of theirs has "replica".

    Args:
        names: of all ops.
        choices: "global" or "replica", by a pattern of a layer's name or path, as `fnmatch` takes it.

    Raises:
        CaptureError: a pattern names no scope.
    """
    unused, found = set(choices), set()
    for name in names:
        scopes = set(_scopes(name))
        pattern = next((one for one in choices if any(fnmatchcase(scope, one) for scope in scopes)), None)
        unused.discard(pattern or "")
        if pattern is not None and choices[pattern] == "replica":
            found.add(name)
    if unused:
        raise CaptureError(
            f"batch_statistics names {', '.join(map(repr, sorted(unused)))}, and the step has no layer, or name scope, "
            "of that name. A name is the layer's, or a path of scopes such as 'encoder/norm_*'"
        )
    return frozenset(found)


def _scopes(name: str) -> Iterable[str]:
    """All paths of scopes that an op stands in, as they are and without what was added to them to be unique."""
    scopes = name.split("/")[:-1]
    for begin in range(len(scopes)):
        for end in range(begin + 1, len(scopes) + 1):
            path = "/".join(scopes[begin:end])
            yield path
            yield _COUNTED.sub("", path)
