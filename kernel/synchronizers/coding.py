"""The codec of some gradients of a program, and its state, while a fragment is traced."""

from collections.abc import Sequence

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Codec, Dense, Slot, State, Wire
from autodist_py.kernel.compressors.registry import codec_of
from autodist_py.kernel.compressors.rounding import travelling
from autodist_py.kernel.memory import Recorder
from autodist_py.kernel.program import Program
from autodist_py.proto.compressors import Compressor, NoneCompressor
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient


def compressor_for(program: Program, gradient: Gradient) -> Compressor | None:
    """What codes a gradient that leaves the worker, or its rows; None: it is as it is.

    Nothing is coded on one worker, nor what has no elements, or is the same on all replicas.
    """
    (synchronizer,) = program.strategy.node(gradient.variable).synchronizers
    compressor = synchronizer.coded_by
    travels = len(program.place.all_workers) > 1 and program.analysis.is_varying(gradient)
    is_empty = 0 in program.item.variable(gradient.variable).shape
    return None if isinstance(compressor, NoneCompressor) or is_empty or not travels else compressor


def described(program: Program, gradient: Gradient, dtype: tf.DType) -> Dense:
    """A dense gradient of the program, in the type in which it is coded."""
    return Dense(gradient.variable, program.item.variable(gradient.variable).shape, dtype)


def _name(program: Program, gradient: Gradient) -> str:
    """What is kept of a gradient is called after its variable, and of a further one of the same by a number, too."""
    same = [one for one in program.item.gradients if one.variable == gradient.variable]
    number = same.index(gradient)
    return f"{gradient.variable}/gradient_{number}" if number else gradient.variable


def codec_for(compressor: Compressor, gradients: Sequence[Dense]) -> tuple[Codec, list[dict[str, Slot]]]:
    """The codec of a compressor, and the state that it keeps of the gradients.

    Raises:
        StrategyError: it keeps some, and the compressor says that it does not.
    """
    codec = codec_of(compressor)
    slots = codec.init(gradients)
    if any(slots) and not compressor.keeps_state:
        raise StrategyError(
            f"compressor {type(compressor).__name__} says keeps_state = False, and keeps {sorted(slots[0])} of the "
            f"gradient of variable '{gradients[0].variable}'; keeps_state = True says what it does"
        )
    return codec, slots


def require_as_said(compressor: Compressor, sent: tf.Tensor, dtype: tf.DType, variable: str) -> None:
    """Refuse what a compressor made of a gradient of that type, where it is summed as another one than was said.

    Raises:
        StrategyError: it travels as another type than `travels_as` says.
    """
    said = travelling(compressor, dtype)
    if not compressor.gathers and sent.dtype != said:
        raise StrategyError(
            f"compressor {type(compressor).__name__} says that numbers of {dtype.name} travel as {said.name}, and "
            f"sends {sent.dtype.name} for the gradient of variable '{variable}'; travels_as says what is sent"
        )


class Coding:
    """A compressor at work on gradients that travel together."""

    def __init__(
        self,
        program: Program,
        compressor: Compressor,
        gradients: Sequence[Gradient],
        dtype: tf.DType,
        recorder: Recorder,
    ):
        """What is kept of the gradients, in that type, from step to step is read."""
        self._compressor, self._recorder = compressor, recorder
        self._gradients = [described(program, gradient, dtype) for gradient in gradients]
        self._codec, kept = codec_for(compressor, self._gradients)
        self._memories = [
            {
                name: recorder.read(
                    slot,
                    name=f"{_name(program, gradient)}/{type(compressor).__name__}/{name}",
                    owner=program.part_of.get(gradient.variable, gradient.variable),
                )
                for name, slot in slots.items()
            }
            for gradient, slots in zip(gradients, kept, strict=True)
        ]

    def compress(self, gradients: Sequence[tf.Tensor], wire: Wire) -> tuple[tf.Tensor, list[State]]:
        """What travels of this worker, and the states for `decompress`, or `keep`."""
        states = [{name: value for name, (_, value) in memory.items()} for memory in self._memories]
        sent, after = self._codec.compress(gradients, states, wire)
        first = self._gradients[0]
        require_as_said(self._compressor, sent, first.dtype, first.variable)
        return sent, after

    def decompress(
        self, travelled: tf.Tensor, states: Sequence[State], wire: Wire
    ) -> tuple[list[tf.Tensor], Sequence[State]]:
        """See Codec."""
        return self._codec.decompress(travelled, self._gradients, states, wire)

    def keep(self, states: Sequence[State], *, after: Sequence[tf.Tensor]) -> None:
        """The next step has these states, when `after` are computed: together with all other workers."""
        for memory, state in zip(self._memories, states, strict=True):
            for name, (handle, _) in memory.items():
                self._recorder.write(handle, state[name], after=after)
