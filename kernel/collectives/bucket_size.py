"""How large the buckets are in which dense gradients are reduced, where the strategy does not say.

All buckets but the last are sent while back-propagation goes on. So n buckets of S bytes in all take the time of n
messages, and S / (n * bandwidth) for the last. That is least where each has sqrt(S * bandwidth * message) bytes.
"""

import math

from autodist_py.proto.graph_item import GraphItem

LARGEST_BUCKET = 2 << 20
"""The largest size that is chosen where the strategy gives none: `benchmarks/collectives.py`, docs/performance.md."""
_FAST_LINK = 1e9
"""In bit/s, from which on the largest buckets are best: there a message costs processor time, which nothing hides."""
_MESSAGE_SECONDS = 1.5e-3
_SMALLEST = 1 << 16
_MOST_BUCKETS = 1000
"""Of all gradients, and of one: each is a few ops of the graph."""


def automatic_bucket_bytes(item: GraphItem, bandwidth: float | None) -> int:
    """The size for this program.

    Args:
        item: whose gradients are reduced. They count as they are, whatever a compressor, a server or factors make of
            them; rows of tables do not count.
        bandwidth: of the slowest link, in bit/s; None: nothing leaves the host.
    """
    if bandwidth is None or bandwidth >= _FAST_LINK:
        return LARGEST_BUCKET
    sizes = [item.variable(gradient.variable).nbytes for gradient in item.gradients]
    total = sum(size for size, gradient in zip(sizes, item.gradients, strict=True) if not gradient.is_sparse)
    best = round(math.sqrt(total * bandwidth / 8 * _MESSAGE_SECONDS))
    # A table may travel as a dense gradient.
    return min(max(best, _SMALLEST, max(total, *sizes, 0) // _MOST_BUCKETS), LARGEST_BUCKET)
