"""What a test cluster's workers do between the cases that they run."""

import os
import sys
from typing import Any

import tensorflow as tf

from tests.support.cluster_worker import leave_datasets_untuned, put_back


def test_of_the_environment_only_what_was_changed_is_put_back(monkeypatch):
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("CHANGED", "before")
    environment = dict(os.environ)
    os.environ["CHANGED"], os.environ["ADDED"] = "after", "added"
    written: list[Any] = []
    recording = True

    def record(event: str, arguments: Any) -> None:
        if recording and event in ("os.putenv", "os.unsetenv"):
            written.append(arguments)

    sys.addaudithook(record)  # It stays, as no hook can be taken away.
    put_back(environment)
    recording = False
    assert dict(os.environ) == environment
    assert sorted(written) == [(b"ADDED",), (b"CHANGED", b"before")]


def test_an_iterator_of_theirs_has_no_autotuning_thread(monkeypatch):
    monkeypatch.setattr(tf.data.Dataset, "_apply_debug_options", tf.data.Dataset._apply_debug_options)
    dataset = tf.data.Dataset.range(9).map(lambda number: number + 1, num_parallel_calls=tf.data.AUTOTUNE)
    leave_datasets_untuned()
    iterator = iter(dataset)
    assert next(iterator) == 1
    assert iterator._dataset.options().autotune.enabled is False
    assert dataset.options().autotune.enabled is None
