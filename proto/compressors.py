"""How gradients are coded on the wire: the compressors that a synchronizer may name, with their parameters.

What they do is the kernel's (`kernel/compressors/`). A synchronizer has a compressor's text, such as
`HorovodCompressor(dtype='bfloat16')`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from autodist_py.proto.calls import construct, parse_call
from autodist_py.proto.checks import require_member
from autodist_py.proto.errors import StrategyError

HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class NoneCompressor:
    """Gradients travel as they are."""


@dataclass(frozen=True, slots=True)
class HorovodCompressor:
    """Gradients are rounded to half precision, travel and are summed so: half of the bytes of float32.

    What has no more bytes already travels as it is.

    Attributes:
        dtype: "float16", of 11 bits of precision, from 6e-8 to 65,504; or "bfloat16", of 8 bits, and the range of
            float32. So that no sum of what n members send is infinite, what one sends ends at an nth of that range:
            a larger finite number is taken for that. (Where gradients are averaged each sends an nth of its own.)

    Raises:
        StrategyError: there is no such type.
    """

    dtype: str = "float16"

    def __post_init__(self) -> None:
        require_member(self.dtype, HALVES, "dtype of HorovodCompressor", error=StrategyError)


@dataclass(frozen=True, slots=True)
class HorovodCompressorEF:
    """As HorovodCompressor; what rounding has taken away is added to the next step's gradient."""


@dataclass(frozen=True, slots=True)
class PowerSGDCompressor:
    """Gradients are approximated at low rank; what is missing is added to the next step's gradient."""


Compressor = NoneCompressor | HorovodCompressor | HorovodCompressorEF | PowerSGDCompressor

COMPRESSORS: Mapping[str, type[Compressor]] = {
    kind.__name__: kind for kind in (NoneCompressor, HorovodCompressor, HorovodCompressorEF, PowerSGDCompressor)
}


def canonical(compressor: Compressor) -> str:
    """The one text that stands for the compressor: its name, and the parameters that differ from their defaults."""
    given = [
        f"{one.name}={getattr(compressor, one.name)!r}"
        for one in fields(compressor)
        if getattr(compressor, one.name) != one.default
    ]
    return f"{type(compressor).__name__}({', '.join(given)})" if given else type(compressor).__name__


def compressor_of(text: str, what: str) -> Compressor:
    """The compressor that `text` names; `what` says whose it is, such as "compressor of AllReduce".

    Raises:
        StrategyError: there is no such compressor or parameter, or the parameter is out of its range.
    """
    if not isinstance(text, str):
        raise StrategyError(f"{what} is a text, such as 'HorovodCompressor'; got {text!r}")
    name, arguments = parse_call(text, "a compressor")
    require_member(name, COMPRESSORS, what, error=StrategyError)
    compressor: Compressor = construct(COMPRESSORS[name], name, arguments, "compressor")
    return compressor
