"""Which lines of a worker's output are shown where not all are: what went wrong, and not what each worker says."""

import re
from collections import deque

_GPU_FILES = "cudart_stub|cuda_platform|cuda_dnn|cuda_fft|cuda_blas|cuda_diagnostics|gpu_device|gpu_utils|dso_loader"
_START_FILES = f"port|cpu_feature_guard|computation_placer|mlir_graph_optimization_pass|{_GPU_FILES}"
_STARTUP = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\)"
    rf"|[IWE]\d{{4}} [\d:. ]+ (?:{_START_FILES})\.cc:\d+\]"
    rf"|\d{{4}}-\d\d-\d\d [\d:.]+: [IWE] \S*/(?:{_START_FILES})\.cc:\d+\]"
    r"|To enable the following instructions: .* rebuild TensorFlow"
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


class Brief:
    """One worker's output, of which warnings, errors, and what comes after an error are shown.

    Attributes:
        hidden: the last lines that were not shown.
    """

    def __init__(self) -> None:
        self.hidden: deque[str] = deque(maxlen=_KEPT_LINES)
        self.is_open = False
        self._goes_on = False

    def shows(self, line: str) -> bool:
        """Whether the next line of the output is shown. A warning goes on in lines that are indented."""
        if is_startup(line):
            return False
        self.is_open |= _ERROR.match(line) is not None
        self._goes_on = _WARNING.match(line) is not None or (self._goes_on and line[:1].isspace())
        if self.is_open or self._goes_on:
            return True
        self.hidden.append(line)
        return False
