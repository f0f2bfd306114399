"""Which lines of other workers are shown."""

import pytest

from autodist_py.cluster.launch.brief import Brief, Noise, is_startup

STARTUP = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795395273.757099   18716 port.cc:153] oneDNN custom operations are on. You may see",
    "I0000 00:00:1795395273.757498   18716 cudart_stub.cc:31] Could not find cuda drivers on your machine",
    "E0000 00:00:1795395668.007152   28717 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error",
    "2026-11-23 00:54:33.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is",
    "2026-11-23 00:54:33.123456: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:9] Unable to register cuDNN",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with these flags.",
]
PROBLEMS = [
    "WARNING:absl:You are saving your model as an HDF5 file",
    "ERROR:root:no such table",
    "/home/ada/train.py:7: UserWarning: the data are old",
    "usage.py: error: unrecognized arguments: --epoch",
    "2026-11-23 00:54:33.123456: W tensorflow/core/framework/op_kernel.cc:1] OP_REQUIRES failed",
]
STOPPED = [
    "E0000 00:00:1795395695.752309   28717 base_collective_executor.cc:252] BaseCollectiveExecutor::StartAbort",
    "Additional GRPC error information from remote target /job:worker/replica:0/task:2 while calling RecvBuf:",
    ':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"recvmsg:Connection reset by peer"}',
    "W0000 00:00:1795395695.752310   28717 local_rendezvous.cc:412] Local rendezvous is aborting with status: ABORTED",
    "The error could be from a previous operation. Restart your program to reset.",
    "\t [[{{node AutoDist/Fetch/stage_0/CollectiveReduceV2}}]] [type.googleapis.com/tensorflow.DerivedStatus='']",
    "2026-11-23 00:54:33.123456: W tensorflow/core/kernels/queue_base.cc:286] Skipping cancelled dequeue attempt",
]
PLAIN = [
    "Epoch 1/3",
    "error 0.25",
    "4/4 ━━━━━━━━━━ 0s 2ms/step - loss: 1.5",
    "  indented",
    "INFO:root:began",
    "mean error: 0.2",
]


@pytest.mark.parametrize("line", STARTUP)
def test_what_tensorflow_says_at_its_start_is_known(line: str) -> None:
    assert is_startup(line)
    assert not Brief().shows(line)


@pytest.mark.parametrize("line", [*PROBLEMS, *PLAIN])
def test_nothing_else_is_taken_for_it(line: str) -> None:
    assert not is_startup(line)


@pytest.mark.parametrize("line", PROBLEMS)
def test_a_problem_is_shown_with_its_indented_lines_only(line: str) -> None:
    brief = Brief()
    shown = [each for each in ("before", line, "  warnings.warn(", "after", "  of it") if brief.shows(each)]
    assert shown == [line, "  warnings.warn("]


@pytest.mark.parametrize("line", PLAIN)
def test_what_went_well_is_not_shown_but_kept(line: str) -> None:
    brief = Brief()
    assert not brief.shows(line)
    assert list(brief.hidden) == [line]


@pytest.mark.parametrize("first", ["Traceback (most recent call last):", "autodist: worker 1 failed"])
def test_after_an_error_all_is_shown(first: str) -> None:
    brief = Brief()
    lines = ["Epoch 1/3", first, "anything", *STARTUP]
    assert [line for line in lines if brief.shows(line)] == [first, "anything"]


def test_what_tensorflow_logs_of_a_step_that_is_stopped_is_not_shown() -> None:
    brief, noise = Brief(), Noise()
    first, last = "Traceback (most recent call last):", ["ValueError: x", *STOPPED[1:3]]
    assert [line for line in (first, *STOPPED, *last) if not noise.has(line)] == [first, *last]
    assert [line for line in (first, *STOPPED, *last) if brief.shows(line)] == [first, *last]
    assert not brief.hidden
