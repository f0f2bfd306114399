"""What of a captured step is not, or may not be, computed as on one device, as the user is told it."""

from collections.abc import Iterator

from autodist_py.proto.graph_item import GraphItem, Output
from autodist_py.proto.text import some


def inexact(item: GraphItem) -> Iterator[str]:
    """What of `item` is not, or may not be, computed as on one device, in sentences for the user."""
    for mixture in item.mixtures:
        yield (
            f"{mixture}. Each replica mixes its own part, so that results depend on the number of replicas, and the "
            f"loss is taken for a {item.loss_reduction} over its parts, as AutoDist(loss_reduction=...) says"
        )
    if item.normalizing_ops:
        yield (
            f"batch normalization ({some(item.normalizing_ops)}) normalizes each replica's part of the batch by "
            "itself; its averages are over all examples"
        )
    if item.local_ops:
        yield (
            f"it is not seen that {some(item.local_ops)} keep examples apart. Where they mix them, each "
            "replica mixes its own, so that results depend on the number of replicas; `autodist verify` tells whether "
            "they do"
        )
    if item.inseparable_ops:
        yield (
            f"it is not seen that {some(item.inseparable_ops)} pass gradients on linearly, each example's by itself. "
            "Where they do not, they are given other numbers than on one device. A term of the loss that depends on no "
            "example, as a regularizer does, is added to a sum over examples behind them, and counts once per "
            "replica; compute it apart from what the examples use, or take the mean over examples"
        )
    unknown = [gradient.variable for gradient in item.gradients if not gradient.reduction]
    if unknown:
        yield (
            f"the loss whose gradients train {some(unknown)} is neither a sum nor a mean over examples, as far as its "
            f"graph shows; it is taken for a {item.loss_reduction}, as AutoDist(loss_reduction=...) says"
        )
    results = [output.tensor for output in item.outputs if not output.reduction and _is_combined(output)]
    if results:
        yield (
            f"it is not seen what the results {some(results)} are for the whole batch. A float of fixed shape is "
            "combined over replicas as AutoDist(fetch_reduction=...) says, and what begins with the batch is joined. "
            "Return what they are made from, or compute them from that outside of the step"
        )


def _is_combined(output: Output) -> bool:
    """Whether a result that is not known is returned all the same: others are refused."""
    return "float" in output.dtype or bool(output.shape and output.shape[0] is None)
