"""Refresh: further replicas begin each step from the first one's variables."""

import numpy as np

from tests.support import kernel_programs

HANDLE_0, HANDLE_1 = "AutoDist-Replica-0/w", "AutoDist-Replica-1/w"


def refreshed(*replicas):
    return kernel_programs.after("refresh", kernel_programs.linear_regression(), kernel_programs.topology(*replicas))


def test_every_use_of_a_copy_waits_for_its_assignment():
    view = refreshed(2).graph
    (assign,) = (node.name for node in view.of_type({"AssignVariableOp"}))
    users = set(view.digraph.succ[HANDLE_1]) - {assign}
    assert users == {"AutoDist-Replica-1/w/Read", "AutoDist-Replica-1/update"}
    assert all(f"^{assign}" in view.nodes[user].input for user in users)


def test_the_first_replica_writes_after_the_others_have_read():
    view = refreshed(3).graph
    assigns = [node for node in view.of_type({"AssignVariableOp"})]
    (read,) = {assign.input[1] for assign in assigns}
    assert [assign.device for assign in assigns] == ["/device:CPU:1", "/device:CPU:2"]
    assert list(view.nodes[read].input) == [HANDLE_0]
    assert f"^{read}" in view.nodes["AutoDist-Replica-0/update"].input


def test_one_local_replica_is_left_as_it_is():
    before = kernel_programs.after("replicate", kernel_programs.linear_regression(), kernel_programs.topology(1, 1))
    assert refreshed(1, 1).graph.graph_def() == before.graph.graph_def()


def test_what_is_written_to_the_first_replica_between_steps_counts_on_all():
    feeds = [{"x": np.ones((4, 3)), "y": np.zeros((4, 1))}]
    item = kernel_programs.linear_regression()
    (one,), _ = kernel_programs.run_steps(item, kernel_programs.topology(1), feeds, {"w": np.full((1, 3), 2.0)})
    stale = {"w": [np.full((1, 3), 2.0), np.full((1, 3), np.nan)]}
    for replica in kernel_programs.run_steps(item, kernel_programs.topology(2), feeds, stale)[0]:
        np.testing.assert_allclose(replica["w"], one["w"], rtol=1e-12)
