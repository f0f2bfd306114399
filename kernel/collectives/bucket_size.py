"""How large the buckets are in which dense gradients are reduced, where the strategy does not say.

A bucket is sent while back-propagation goes on, but for the last one. n buckets of S bytes in all take n times what a
message takes, and S / (n * bandwidth) for the last: least where each has sqrt(S * bandwidth * message) bytes.
"""

import math
from typing import TypedDict

from autodist_py.kernel.collectives.engines import slowest_bandwidth
from autodist_py.kernel.program import LARGEST_BUCKET
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec

_FAST_LINK = 1e9
"""In bit/s, from which on the largest buckets are best, as what a message takes is then time of the processor's."""
_MESSAGE_SECONDS = 1.5e-3
_SMALLEST = 1 << 16
_MOST_BUCKETS = 1000
"""Each is a few ops of the graph."""


class OfLinks(TypedDict):
    """Those of a program's options that follow from the links between its workers."""

    bandwidth: float | None
    bucket_bytes: int


def of_links(item: GraphItem, resources: ResourceSpec) -> OfLinks:
    """For this program on these nodes."""
    bandwidth = slowest_bandwidth(resources)
    return OfLinks(bandwidth=bandwidth, bucket_bytes=automatic_bucket_bytes(item, bandwidth))


def automatic_bucket_bytes(item: GraphItem, bandwidth: float | None) -> int:
    """In how many bytes at most; `bandwidth` is that of the slowest link, in bit/s; None: nothing leaves the host."""
    if bandwidth is None or bandwidth >= _FAST_LINK:
        return LARGEST_BUCKET
    total = sum(item.variable(gradient.variable).nbytes for gradient in item.gradients if not gradient.is_sparse)
    best = round(math.sqrt(total * bandwidth / 8 * _MESSAGE_SECONDS))
    return min(max(best, _SMALLEST, total // _MOST_BUCKETS), LARGEST_BUCKET)
