"""Names of tensors and ops, and the scopes of replicas."""

import pytest

from autodist_py.kernel.ir import names


@pytest.mark.parametrize(
    ("text", "op", "output", "printed"),
    [("a/b", "a/b", 0, "a/b"), ("a/b:0", "a/b", 0, "a/b"), ("a:12", "a", 12, "a:12"), ("^a/b", "a/b", -1, "^a/b")],
)
def test_a_name_is_taken_apart_and_printed_in_its_shortest_form(text, op, output, printed):
    parts = names.parse(text)
    assert (parts.op, parts.output, str(parts)) == (op, output, printed)
    assert parts.is_control == text.startswith("^")
    assert names.op_of(text) == op


@pytest.mark.parametrize("name", ["a/b", "a:1", "^a/b"])
def test_a_name_on_a_replica_keeps_its_kind_and_says_whose_it_is(name):
    there = names.on_replica(11, name)
    assert names.parse(there).output == names.parse(name).output
    assert names.op_of(there) == f"AutoDist-Replica-11/{names.op_of(name)}"
    assert names.replica_of(names.op_of(there)) == 11


def test_what_stands_once_is_on_no_replica():
    assert names.replica_of("a/AutoDist-Replica-1/b") is None
    assert names.replica_of("AutoDist/Batch/x") is None
