"""The codec of some gradients of a program, and its state, while a fragment is traced."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Codec, Dense, Slot, State, Wire
from autodist_py.kernel.compressors.registry import codec_of
from autodist_py.kernel.compressors.rounding import travelling
from autodist_py.kernel.ir.state import Recorder
from autodist_py.kernel.program import Program
from autodist_py.proto.compressors import Compressor
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient


def compressor_for(program: Program, gradient: Gradient) -> Compressor | None:
    """What codes a gradient that leaves the worker, or its rows; None: it is as it is.

    Nothing is coded on one worker, nor what has no elements, or is the same on all replicas.
    """
    (synchronizer,) = program.strategy.node(gradient.variable).synchronizers
    compressor = synchronizer.compressor
    travels = len(program.topology.all_workers) > 1 and program.analysis.is_varying(gradient)
    is_empty = 0 in program.item.variable(gradient.variable).shape
    return None if compressor.passes_through or is_empty or not travels else compressor


def described(program: Program, gradient: Gradient, dtype: tf.DType) -> Dense:
    """A dense gradient of the program, in the type in which it is coded."""
    return Dense(gradient.variable, program.item.variable(gradient.variable).shape, dtype)


def _name(program: Program, gradient: Gradient) -> str:
    """What is kept of a gradient is called after its variable, and of a further one of the same by a number, too."""
    number = program.item.gradients_of(gradient.variable).index(gradient)
    return f"{gradient.variable}/gradient_{number}" if number else gradient.variable


def codec_for(compressor: Compressor, gradients: Sequence[Dense]) -> tuple[Codec, list[dict[str, Slot]]]:
    """The codec of a compressor, and the state that it keeps of the gradients.

    Raises:
        StrategyError: it keeps some, and the compressor says that it does not; or `init` returns something else.
    """
    codec = codec_of(compressor)
    slots = codec.init(gradients)
    if not _is_of_slots(slots, len(gradients)):
        raise StrategyError(
            f"init of compressor {type(compressor).__name__} returns a dict of slots by name for each gradient, {{}} "
            f"where it keeps nothing; of {len(gradients)} gradients got {slots!r}"
        )
    if any(slots) and not compressor.keeps_state:
        raise StrategyError(
            f"compressor {type(compressor).__name__} says keeps_state = False, and keeps {sorted(slots[0])} of the "
            f"gradient of variable '{gradients[0].variable}'; keeps_state = True says what it does"
        )
    return codec, slots


def _is_of_slots(slots: object, number: int) -> bool:
    return (
        isinstance(slots, Sequence)
        and len(slots) == number
        and all(isinstance(one, Mapping) and all(isinstance(slot, Slot) for slot in one.values()) for one in slots)
    )


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
        self._compressor_states = [
            {
                name: recorder.read(
                    slot,
                    name=f"{_name(program, gradient)}/{type(compressor).__name__}/{name}",
                    owner=program.cuts.part_of.get(gradient.variable, gradient.variable),
                )
                for name, slot in slots.items()
            }
            for gradient, slots in zip(gradients, kept, strict=True)
        ]

    def compress(self, gradients: Sequence[tf.Tensor], wire: Wire) -> tuple[tf.Tensor, list[State]]:
        """What travels of this worker, and the states for `decompress`, or `keep`."""
        states = [{name: value for name, (_, value) in kept.items()} for kept in self._compressor_states]
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
        for kept, state in zip(self._compressor_states, states, strict=True):
            for name, (handle, _) in kept.items():
                self._recorder.write(handle, state[name], after=after)
