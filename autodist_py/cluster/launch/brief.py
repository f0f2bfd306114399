"""Which lines of a worker's output are shown where not all are: what went wrong, and not what each worker says."""

import re
from collections import deque

_GPU_FILES = "cudart_stub|cuda_platform|cuda_dnn|cuda_fft|cuda_blas|cuda_diagnostics|gpu_device|gpu_utils|dso_loader"
_START_FILES = f"port|cpu_feature_guard|computation_placer|mlir_graph_optimization_pass|{_GPU_FILES}"
_STEP_FILES = (
    r"local_rendezvous|queue_base|master_session|base_collective_executor|ring_\w+|\w+_broadcaster|grpc_worker_service"
)


def _logged_in(files: str) -> str:
    """How a line begins that one of these files of TensorFlow's own code logs."""
    return (
        rf"[IWE]\d{{4}} [\d:. ]+ (?:{files})\.cc:\d+\]"
        rf"|\d{{4}}-\d\d-\d\d [\d:.]+: [IWE] \S*/(?:{files})\.cc:\d+\]"
    )


_STARTUP = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\)|"
    + _logged_in(_START_FILES)
    + r"|To enable the following instructions: .* rebuild TensorFlow"
)
_STOPPED = re.compile(_logged_in(_STEP_FILES))
_STOPPED_GOES_ON = re.compile(
    r"\s|:\w+:|Additional GRPC error information|The error could be from a previous operation"
)
_ERROR = re.compile(r"Traceback \(most recent call last\)|autodist: |Fatal Python error|terminate called")
_WARNING = re.compile(
    r"(?:WARNING|ERROR|CRITICAL|FATAL)\b"  # As logging and absl begin a line.
    r"|[WEF]\d{4} \d\d:\d\d|\d{4}-\d\d-\d\d [\d:.]+: [WEF] "  # As TensorFlow's own code does.
    r"|.*: (?:\w*Warning|error|fatal): "
)

_KEPT_LINES = 20


def is_startup(line: str) -> bool:
    """Whether TensorFlow says it when it starts, whatever the program: which instructions and GPUs it found, or not."""
    return _STARTUP.match(line) is not None


class Noise:
    """What TensorFlow's own code logs at its start, and of steps that are stopped, for each op that ends with one.

    The error that such a step raises, and the cause of the run's end, say what happened.
    """

    def __init__(self) -> None:
        self._goes_on = False

    def has(self, line: str) -> bool:
        """Whether the next line of an output is such noise, or goes on with it."""
        self._goes_on = _STOPPED.match(line) is not None or (self._goes_on and _STOPPED_GOES_ON.match(line) is not None)
        return self._goes_on or is_startup(line)


class Brief:
    """One worker's output, of which warnings, errors, and what comes after an error are shown.

    Attributes:
        hidden: the last lines that were not shown.
    """

    def __init__(self) -> None:
        self.hidden: deque[str] = deque(maxlen=_KEPT_LINES)
        self.is_open = False
        self._noise = Noise()
        self._goes_on = False

    def shows(self, line: str) -> bool:
        """Whether the next line of the output is shown. A warning goes on in lines that are indented."""
        if self._noise.has(line):
            return False
        self.is_open |= _ERROR.match(line) is not None
        self._goes_on = _WARNING.match(line) is not None or (self._goes_on and line[:1].isspace())
        if self.is_open or self._goes_on:
            return True
        self.hidden.append(line)
        return False
