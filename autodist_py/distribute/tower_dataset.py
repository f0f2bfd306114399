"""A dataset whose elements are dealt out to towers, one to each in turn."""

from typing import Any

import tensorflow as tf

from autodist_py.distribute import tf_adapter


class TowerDataset(tf_adapter.DatasetV1Adapter):
    """A dataset each of whose elements has, for each tower, one element of another dataset.

    Towers are given the elements in turn, so a batch of the dataset is one tower's. Elements that are too few for all
    towers, at the end, are left out.
    """

    def __init__(self, dataset: tf.data.Dataset, num_towers: int):
        def dealt(*windows: Any) -> tuple[Any, ...]:
            window = tf.data.Dataset.zip(windows if isinstance(dataset.element_spec, tuple) else windows[0])
            return tuple(window.skip(tower).take(1).get_single_element() for tower in range(num_towers))

        self._tuples = dataset.window(num_towers, drop_remainder=True).map(dealt)
        super().__init__(self._tuples.map(lambda *elements: tf_adapter.regroup(elements)))

    def _make_one_shot_iterator(self) -> Any:
        if tf_adapter.runs_eagerly():
            return super()._make_one_shot_iterator()
        return _TowerIterator(tf.compat.v1.data.make_one_shot_iterator(self._tuples))

    def _make_initializable_iterator(self, shared_name: str | None = None) -> Any:
        return _TowerIterator(tf.compat.v1.data.make_initializable_iterator(self._tuples, shared_name))


class _TowerIterator:
    """An iterator of a session's graph, which has no tensors of several towers, over tuples with one for each."""

    def __init__(self, tuples: Any):
        self._tuples = tuples

    @property
    def initializer(self) -> tf.Operation:
        """The op that begins anew; a one-shot iterator raises a ValueError."""
        return self._tuples.initializer

    def get_next(self, name: str | None = None) -> Any:
        """The next element of each tower."""
        return tf_adapter.regroup(self._tuples.get_next(name))
