"""What all workers must agree on before they run a program together."""

import pytest

from autodist_py.compiler import launches_text, require_same_launches
from autodist_py.kernel.pipeline import compile
from autodist_py.proto.errors import AutoDistError
from tests.kernel import programs


def launches(worker: int, *, chunk_size: int = 128) -> bytes:
    item = programs.dense_and_sparse()
    where = programs.place(2, 1, worker=worker)
    return launches_text(compile(item, programs.all_reduce(item, chunk_size=chunk_size), where)).encode()


def test_workers_with_other_numbers_of_replicas_launch_the_same():
    require_same_launches({0: launches(0), 1: launches(1)})


def test_another_group_on_one_worker_is_named_before_anyone_waits():
    with pytest.raises(AutoDistError, match=r"collectives of worker 1 are not the chief's.*dense gradients of"):
        require_same_launches({0: launches(0), 1: launches(1, chunk_size=1)})
