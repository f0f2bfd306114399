"""What a layer asks of tf.distribute: to combine a value over replicas, of which it is told that there is one.

Keras's synchronized batch normalization does, old and new, and so do layers that users write for it. For one device
such a call returns its argument, so a captured step would be one in which nobody had asked. What asks so outside of
layers (tf_keras's optimizers, of gradients) is combined as it is: there one device's answer is the right one.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.proto.errors import CaptureError

_COMBINE = ("all_gather", "all_reduce")
"""The methods of `tf.distribute.ReplicaContext` that combine a value over replicas."""


@contextmanager
def refused_combinations(graph: tf.Graph, layer: Callable[[], str | None]) -> Iterator[None]:
    """Within this context no layer of a step that is captured in `graph`, for parts of a batch, asks for a combination.

    Args:
        graph: where the step is captured.
        layer: the name of the layer that is called just now; None: there is none.

    Raises:
        CaptureError: one does; the message names it.
    """
    context = tf.distribute.ReplicaContext
    with ExitStack() as stack:
        for name in _COMBINE:
            owner = next(each for each in context.__mro__ if name in vars(each))
            stack.enter_context(tf_adapter.patched(owner, name, _refusing(getattr(context, name), name, graph, layer)))
        yield


def _refusing(
    original: Callable[..., Any], name: str, graph: tf.Graph, layer: Callable[[], str | None]
) -> Callable[..., Any]:
    def combine(context: Any, *args: Any, **kwargs: Any) -> Any:
        asking = layer()
        if asking is None or not tf_adapter.is_within(graph):
            return original(context, *args, **kwargs)
        raise CaptureError(
            f"layer '{asking}' asks tf.distribute to combine a value over replicas "
            f"(ReplicaContext.{name}), as synchronized batch normalization does. A captured step is that of one "
            "device, so the request would count for nothing, and each replica would normalize its own part. "
            'AutoDist(batch_statistics="global") normalizes the whole batch. Or leave it out '
            "(BatchNormalization(synchronized=False)), use a layer that keeps examples apart (GroupNormalization, "
            "LayerNormalization), or train on one device"
        )

    return combine
