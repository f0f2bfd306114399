"""Which codec does what a compressor says."""

from collections.abc import Callable, Mapping
from typing import Any

from autodist_py.kernel.compressors.codec import Codec
from autodist_py.kernel.compressors.int8 import Int8
from autodist_py.kernel.compressors.power_sgd import PowerSGD
from autodist_py.kernel.compressors.rounding import Rounding, RoundingWithFeedback
from autodist_py.kernel.compressors.top_k import TopK
from autodist_py.proto.compressors import (
    Compressor,
    HorovodCompressor,
    HorovodCompressorEF,
    Int8Compressor,
    PowerSGDCompressor,
    TopKCompressor,
)
from autodist_py.proto.errors import StrategyError

_CODECS: Mapping[type[Any], Callable[[Any], Codec]] = {
    HorovodCompressor: Rounding,
    HorovodCompressorEF: RoundingWithFeedback,
    PowerSGDCompressor: PowerSGD,
    TopKCompressor: TopK,
    Int8Compressor: Int8,
}


def codec_of(compressor: Compressor) -> Codec:
    """The codec of a compressor that is built in; one of another package is its own.

    Raises:
        StrategyError: it has no codec.
    """
    if type(compressor) in _CODECS:
        return _CODECS[type(compressor)](compressor)
    if isinstance(compressor, Codec):
        return compressor
    raise StrategyError(
        f"compressor {type(compressor).__name__} cannot code gradients: it has no init, compress and decompress, as a "
        f"Codec has; built in are {', '.join(kind.__name__ for kind in _CODECS)}"
    )
