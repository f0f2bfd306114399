"""How gradients are coded on the wire: the compressors that a synchronizer may have, with their parameters.

What they do is the kernel's (`kernel/compressors/`). A compressor is a value, and is written as a text, such as
`PowerSGDCompressor(rank=2)`. One of a package of its own is registered under the entry points
`autodist_py.compressors`, or written `module:Name`. The module is long, as it is a list of them, each with its facts.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

from autodist_py.proto.calls import parse_call
from autodist_py.proto.checks import is_writable, require_member
from autodist_py.proto.dtypes import ITEM_SIZES
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.plugins import Registry
from autodist_py.proto.text import shown, some

HALVES = ("float16", "bfloat16")

_HALF_BYTES, _SINGLE_BYTES, _INDEX_BYTES = 2, 4, 4
_LEAST_BLOCK = 4
_MATRIX_AXES = 2


@runtime_checkable
class Compressor(Protocol):
    """A way to code gradients: a frozen dataclass whose fields are its parameters.

    Attributes:
        passes_through: whether gradients travel as they are: they are not coded, and take the bytes that they have.
        gathers: whether what the workers send is gathered and decoded by each, or (False) summed as it travels.
        sums_first: whether workers need sums of theirs before, which servers, who take messages, have not.
        keeps_state: whether a worker keeps something for the next step, say what did not travel, or a count of steps.
        codes_rows: whether rows of a sparse gradient may be rounded to the type that `travels_as` says; else a variable
            that has such a gradient cannot have this compressor, unless it gives up nothing.
        gives_up: what is lost, for people; "" where nothing is.
    """

    @property
    def passes_through(self) -> bool: ...
    @property
    def gathers(self) -> bool: ...
    @property
    def sums_first(self) -> bool: ...
    @property
    def keeps_state(self) -> bool: ...
    @property
    def codes_rows(self) -> bool: ...
    @property
    def gives_up(self) -> str: ...

    def travels_as(self, dtype: str) -> str:
        """The type as which numbers of a type travel where they are summed, or are rows: "float32" and so on."""
        ...

    def wire_bytes(self, shape: tuple[int, ...], item: int) -> int:
        """The bytes that stand for a dense gradient of this shape, of `item` bytes a number."""
        ...


_FACTS = ("passes_through", "gathers", "sums_first", "keeps_state", "codes_rows", "gives_up")
_MEMBERS = (*_FACTS, "travels_as", "wire_bytes")
"""What every compressor's class has."""


@dataclass(frozen=True, slots=True)
class NoneCompressor:
    """Gradients travel as they are."""

    passes_through: ClassVar[bool] = True
    gathers: ClassVar[bool] = False
    sums_first: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = False
    codes_rows: ClassVar[bool] = True
    gives_up: ClassVar[str] = ""

    def travels_as(self, dtype: str) -> str:
        """See Compressor."""
        return dtype

    def wire_bytes(self, shape: tuple[int, ...], item: int) -> int:
        """See Compressor."""
        return math.prod(shape) * item


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

    passes_through: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    sums_first: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = False
    codes_rows: ClassVar[bool] = True
    gives_up: ClassVar[str] = "gradients are rounded to half precision, and cut off at an nth of its range on n workers"

    dtype: str = "float16"

    def __post_init__(self) -> None:
        require_member(self.dtype, HALVES, f"dtype of {type(self).__name__}", error=StrategyError)

    def travels_as(self, dtype: str) -> str:
        """The type as which numbers of a type travel: as they are, if they have no more bytes."""
        return self.dtype if ITEM_SIZES.get(dtype, 0) > _HALF_BYTES else dtype

    def wire_bytes(self, shape: tuple[int, ...], item: int) -> int:
        """See Compressor."""
        return math.prod(shape) * min(item, _HALF_BYTES)


@dataclass(frozen=True, slots=True)
class HorovodCompressorEF(HorovodCompressor):
    """As HorovodCompressor; what rounding and cutting off have taken away is added to the next step's gradient.

    That is what each worker's own gradient has lost; what adding up in half precision rounds is not fed back. Rows of a
    sparse gradient are rounded without feedback: they are other rows in the next step.
    """

    keeps_state: ClassVar[bool] = True
    gives_up: ClassVar[str] = "gradients are rounded to half precision, and the error is added to the next step's"


@dataclass(frozen=True, slots=True)
class PowerSGDCompressor:
    """Gradients are approximated as products of two narrow matrices; what is missing is added to the next step's.

    T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD, NeurIPS 2019, algorithms 1 and 2: one power iteration a step that
    begins with the last one's factor, orthogonalized, and error feedback from the approximation of the sum. A gradient
    of more than two axes is taken for a matrix of its last axis by all others. One of fewer, and one of which the
    factors would have no fewer bytes, travels uncompressed; numbers of half precision as float32.

    Attributes:
        rank: the width of the factors.

    Raises:
        StrategyError: the rank is not 1 at least.
    """

    passes_through: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    sums_first: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = True
    codes_rows: ClassVar[bool] = False
    gives_up: ClassVar[str] = "gradients are approximated at low rank, and the error is added to the next step's"

    rank: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise StrategyError(f"rank of PowerSGDCompressor must be an integer >= 1; got {shown(self.rank)}")

    def factors(self, shape: tuple[int, ...], item: int) -> tuple[int, int, int] | None:
        """The rows and columns of the matrix, and the width of its factors; None: it travels as it is."""
        if len(shape) < 2:
            return None
        rows, columns = math.prod(shape[:-1]), shape[-1]
        rank = min(self.rank, rows, columns)
        narrow = rank * (rows + columns) * max(item, _SINGLE_BYTES)
        return (rows, columns, rank) if narrow < rows * columns * item else None

    def travels_as(self, dtype: str) -> str:
        """The type as which numbers of a type travel: as they are, if they have no fewer bytes than float32."""
        return "float32" if ITEM_SIZES.get(dtype, 0) < _SINGLE_BYTES else dtype

    def wire_bytes(self, shape: tuple[int, ...], item: int) -> int:
        """See Compressor."""
        factors = self.factors(shape, item)
        if factors is None:
            return math.prod(shape) * max(item, _SINGLE_BYTES)
        rows, columns, rank = factors
        return rank * (rows + columns) * max(item, _SINGLE_BYTES)


@dataclass(frozen=True, slots=True)
class TopKCompressor:
    """Of each gradient the largest numbers travel, with their places; the others are added to the next step's.

    Y. Lin et al.: Deep Gradient Compression, ICLR 2018, section 3: local accumulation, momentum correction and momentum
    factor masking; without its warm-up and its clipping.

    Attributes:
        ratio: how many of a gradient's numbers travel, of 1; one at least.
        momentum: what the optimizer's momentum would be. It is applied by each worker to its own gradients, before the
            largest are chosen. An optimizer that has momentum itself (SGD's, Adam's beta_1) would count it twice, and
            nothing sees that: give the optimizer none, or leave it 0: no momentum correction, for any optimizer.

    Raises:
        StrategyError: a parameter is out of its range.
    """

    passes_through: ClassVar[bool] = False
    gathers: ClassVar[bool] = True
    sums_first: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True
    codes_rows: ClassVar[bool] = False
    gives_up: ClassVar[str] = (
        "only the largest numbers of gradients travel, and the others are added to the next step's"
    )

    ratio: float = 0.01
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float) or not 0 < self.ratio <= 1:
            raise StrategyError(f"ratio of TopKCompressor is more than 0 and at most 1; got {shown(self.ratio)}")
        if isinstance(self.momentum, bool) or not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise StrategyError(f"momentum of TopKCompressor is at least 0 and less than 1; got {shown(self.momentum)}")
        object.__setattr__(self, "ratio", float(self.ratio))
        object.__setattr__(self, "momentum", float(self.momentum))

    def kept(self, elements: int) -> int:
        """How many of so many numbers travel."""
        return min(elements, max(1, math.ceil(self.ratio * elements)))

    def travels_as(self, dtype: str) -> str:
        """See Compressor."""
        return dtype

    def wire_bytes(self, shape: tuple[int, ...], item: int) -> int:
        """See Compressor."""
        return self.kept(math.prod(shape)) * (max(item, _SINGLE_BYTES) + _INDEX_BYTES)


@dataclass(frozen=True, slots=True)
class Int8Compressor:
    """Numbers travel as 8 bits each, with a scale for each block of them; stochastic rounding keeps their mean.

    D. Alistarh et al.: QSGD, NIPS 2017, with the largest number of a block as its scale. As a ring carries no bytes to
    be summed, each worker is sent those of every other: with n workers (n - 1) bytes for each number, where a ring
    sends 8 (n - 1) / n of float32. So it is for few workers. A block with an infinite number, or NaN, is all NaN.

    Attributes:
        block: how many numbers share a scale.

    Raises:
        StrategyError: a block is no multiple of 4.
    """

    passes_through: ClassVar[bool] = False
    gathers: ClassVar[bool] = True
    sums_first: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True
    codes_rows: ClassVar[bool] = False
    gives_up: ClassVar[str] = "gradients are rounded to 8 bits, up or down at random so that their mean is kept"

    block: int = 256

    def __post_init__(self) -> None:
        is_integer = isinstance(self.block, int) and not isinstance(self.block, bool)
        if not is_integer or self.block < _LEAST_BLOCK or self.block % _LEAST_BLOCK:
            raise StrategyError(
                f"block of Int8Compressor must be a multiple of {_LEAST_BLOCK}; got {shown(self.block)}"
            )

    def travels_as(self, dtype: str) -> str:
        """See Compressor."""
        return dtype

    def wire_bytes(self, shape: tuple[int, ...], item: int) -> int:
        """See Compressor."""
        elements = math.prod(shape)
        return elements + -elements % _SINGLE_BYTES + _SINGLE_BYTES * -(-elements // self.block)


COMPRESSORS: Mapping[str, type[Compressor]] = {
    kind.__name__: kind
    for kind in (
        NoneCompressor,
        HorovodCompressor,
        HorovodCompressorEF,
        PowerSGDCompressor,
        TopKCompressor,
        Int8Compressor,
    )
}
"""Those that are built in."""

PLUGINS = Registry("compressor", "autodist_py.compressors", {name: f"{__name__}:{name}" for name in COMPRESSORS})


def compressor_of(given: Compressor | str, what: str) -> Compressor:
    """The compressor that is given, or that a text names; `what` says whose it is, such as "compressor of AllReduce".

    Raises:
        StrategyError: there is no such compressor or parameter, a parameter is out of its range, or the workers could
            not be told of it, as no text names it.
    """
    try:
        if isinstance(given, type):
            raise StrategyError(f"a compressor is a value; got the class {given.__name__}; write {given.__name__}()")
        if not isinstance(given, str):
            _require_compressor(type(given), shown(given))
            _require_value(given)
            return given
        # What a module of the user's own is asked for may change in a session, and is looked up each time.
        compressor = _made(given) if ":" in given else _made_once(given)
        if ":" in given:
            _require_value(compressor)
    except StrategyError as error:
        raise StrategyError(f"{what}: {error}") from error
    return compressor


def text_of(compressor: Compressor) -> str:
    """The one text that names an equal compressor: its name, and the parameters that differ from their defaults.

    Raises:
        StrategyError: as `call_of`.
    """
    name, arguments = call_of(compressor)
    return f"{name}({arguments})" if arguments else name


def call_of(compressor: Compressor) -> tuple[str, str]:
    """The name by which a text names the compressor, and the parameters that differ from their defaults, as text.

    Raises:
        StrategyError: a parameter is no literal, or no text can name the class.
    """
    kind = type(compressor)
    differing = []
    for name, default in _defaults(kind).items():
        value = getattr(compressor, name)
        if value != default:
            differing.append(f"{name}={_literal(kind, name, value)}")
    return _name_of(kind), ", ".join(differing)


def _literal(kind: type[Any], name: str, value: object) -> str:
    if not _is_literal(value):
        raise StrategyError(
            "a parameter of a compressor is a number, a text, None or a tuple of these, as workers are sent it as "
            f"text; got {name}={shown(value)} of {kind.__name__}"
        )
    return repr(value)


def _is_literal(value: object) -> bool:
    """Whether equal values have equal texts, in every process, and the text is short."""
    if isinstance(value, tuple):
        return all(map(_is_literal, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return type(value) in (int, bool, str, type(None)) and is_writable(value)


def _require_value(compressor: Compressor) -> None:
    """Refuse a compressor that the workers could not be told of: what its text makes is another, or none.

    Raises:
        StrategyError: as `call_of`; or it has no hash, is not equal to what its text makes, or a fact of another type.
    """
    text = text_of(compressor)
    if type(compressor) in COMPRESSORS.values():
        return
    try:
        is_same = hash(compressor) == hash(_made(text)) and _made(text) == compressor
    except TypeError:
        is_same = False
    if not is_same:
        raise StrategyError(
            f"a compressor is equal to another one of the same parameters, and has their hash, as a frozen dataclass "
            f"with eq=True is; {text} is not. Leave eq and unsafe_hash out"
        )


@functools.lru_cache(maxsize=256)
def _defaults(kind: type[Any]) -> Mapping[str, object]:
    return {one.name: one.default for one in fields(kind) if one.init}


@functools.lru_cache(maxsize=256)
def _name_of(kind: type[Any]) -> str:
    return PLUGINS.name_of(kind)


def _made(text: str) -> Compressor:
    name, arguments = parse_call(text, "a compressor")
    return cast(Compressor, PLUGINS.make(name, arguments, _require_compressor))


_made_once = functools.lru_cache(maxsize=256)(_made)
"""Strategies have a synchronizer for each of thousands of variables, and few compressors."""


def _require_compressor(kind: Any, name: str) -> None:
    """Refuse what is no compressor's class.

    Raises:
        StrategyError: it is another class, or none.
    """
    is_value = isinstance(kind, type) and is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    missing = [member for member in _MEMBERS if not hasattr(kind, member)]
    if not is_value or missing:
        raise StrategyError(
            f"{name} is no compressor, a frozen dataclass that has {', '.join(_FACTS)}, travels_as(dtype) "
            f"and wire_bytes(shape, item). {'It is none' if not is_value else f'It lacks {some(missing)}'}"
        )
