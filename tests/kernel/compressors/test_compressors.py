"""What travels instead of a gradient: equal to a model of it in numpy."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist_py.kernel.compressors.codec import Codec, Dense, Wire
from autodist_py.kernel.compressors.registry import codec_of
from autodist_py.kernel.compressors.rounding import rounded
from autodist_py.proto.compressors import compressor_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from tests.support import kernel_programs
from tests.support.compressor_models import MODELS, WITH_FEEDBACK, model_of

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


class Workers:
    """A codec at work on several workers, each a thread that keeps its own state from step to step."""

    def __init__(self, compressor: str, shapes: Sequence[tuple[int, ...]], workers: int, dtype: tf.DType = tf.float64):
        self._compressor = compressor_of(compressor, "compressor")
        self.codec: Codec = codec_of(self._compressor)
        self._workers = workers
        self._sent: dict[int, tf.Tensor] = {}
        self._meeting = threading.Barrier(workers, timeout=60)
        self._described = [Dense(f"v{position}", shape, dtype) for position, shape in enumerate(shapes)]
        self.states: list[list[dict[str, tf.Tensor]]] = [
            [
                {
                    name: tf.zeros(slot.shape, slot.dtype) if slot.initial is None else tf.constant(slot.initial())
                    for name, slot in slots.items()
                }
                for slots in self.codec.init(self._described)
            ]
            for _ in range(workers)
        ]

    def step(self, gradients: Sequence[Sequence[Any]]) -> list[np.ndarray]:
        """The combined gradients, which are the same on all workers, of each worker's."""
        with ThreadPoolExecutor(self._workers) as threads:
            results = list(threads.map(self._step, range(self._workers), gradients))
        for others in results[1:]:
            for one, other in zip(results[0], others, strict=True):
                np.testing.assert_array_equal(one, other)
        return [one.numpy() for one in results[0]]

    def _step(self, rank: int, gradients: Sequence[Any]) -> list[tf.Tensor]:
        wire = Wire(rank, self._workers, lambda value: tf.add_n(self._all(rank, value)))
        sent, states = self.codec.compress([tf.convert_to_tensor(one) for one in gradients], self.states[rank], wire)
        travelled = tf.stack(self._all(rank, sent)) if self._compressor.gathers else wire.total(sent)
        totals, final = self.codec.decompress(travelled, self._described, states, wire)
        assert [set(state) for state in final] == [set(state) for state in self.states[rank]]
        self.states[rank] = [dict(state) for state in final]
        return totals

    def _all(self, rank: int, value: tf.Tensor) -> list[tf.Tensor]:
        self._sent[rank] = value
        self._meeting.wait()
        values = [self._sent[other] for other in range(self._workers)]
        self._meeting.wait()
        return values


def gradients_of(rng: np.random.Generator, shapes: Sequence[tuple[int, ...]], workers: int) -> list[list[np.ndarray]]:
    return [[rng.normal(size=shape) * rng.choice([1e-3, 1.0, 30.0]) for shape in shapes] for _ in range(workers)]


@pytest.mark.parametrize("compressor", MODELS)
@settings(max_examples=5, deadline=None)
@given(
    shape=st.sampled_from([(12, 7), (3, 3, 4, 8), (23,), (1, 9), (64, 64)]),
    workers=st.integers(1, 4),
    seed=st.integers(0, 2**20),
)
def test_a_codec_is_the_model_of_its_paper(compressor, shape, workers, seed):
    rng = np.random.default_rng(seed)
    cluster = Workers(compressor, [shape], workers)
    model = model_of(compressor, "v0", shape)
    for _ in range(4):
        gradients = gradients_of(rng, [shape], workers)
        expected = model([own[0] for own in gradients])
        np.testing.assert_allclose(cluster.step(gradients)[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compressor", [text for text in MODELS if "Int8" not in text])
def test_gradients_of_a_group_are_coded_as_each_by_itself(compressor):
    shapes = [(12, 7), (23,), (3, 5, 9), ()]
    rng = np.random.default_rng(3)
    cluster = Workers(compressor, shapes, 2)
    models = [model_of(compressor, f"v{position}", shape or (1,)) for position, shape in enumerate(shapes)]
    for _ in range(3):
        gradients = gradients_of(rng, shapes, 2)
        for position, total in enumerate(cluster.step(gradients)):
            shape = shapes[position]
            expected = models[position]([np.reshape(own[position], shape or (1,)) for own in gradients])
            np.testing.assert_allclose(total, np.reshape(expected, shape), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compressor", MODELS)
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32])
def test_combined_gradients_have_the_type_of_the_gradients(compressor, dtype):
    rng = np.random.default_rng(4)
    cluster = Workers(compressor, [(16, 16), (5,)], 2, dtype)
    own = [tf.cast(tf.constant(rng.normal(size=shape)), dtype) for shape in [(16, 16), (5,)]]
    for _ in range(2):
        assert [total.dtype for total in cluster.step([own, own])] == [dtype.as_numpy_dtype] * 2


def accumulated(compressor: str, gradients: Sequence[np.ndarray], steps: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """The sums of the combined gradients of all steps, if each worker has the same gradient in each of them.

    With error feedback, and with states that are forgotten after each step; and what workers still hold at the end.
    """
    shape = gradients[0].shape
    remembering, forgetful = (Workers(compressor, [shape], len(gradients)) for _ in range(2))
    fresh = [[dict(slots) for slots in state] for state in forgetful.states]
    applied, without = np.zeros(shape), np.zeros(shape)
    for _ in range(steps):
        applied += remembering.step([[one] for one in gradients])[0]
        forgetful.states = [[dict(slots) for slots in state] for state in fresh]
        without += forgetful.step([[one] for one in gradients])[0]
    held = sum(next(iter(state[0].values())).numpy().reshape(shape) for state in remembering.states)
    return applied, without, held


@pytest.mark.parametrize("compressor", [text for text in WITH_FEEDBACK if "momentum" not in text])
def test_with_error_feedback_what_is_applied_nears_the_sum_of_all_gradients(compressor):
    """What is missing after any number of steps is what the workers hold then: the error of a few steps, no more."""
    rng = np.random.default_rng(5)
    one = rng.normal(size=(24, 16))
    # Of equal numbers in half precision the sum is exact; of others see the next test.
    gradients = [one, one] if "Horovod" in compressor else [one, rng.normal(size=(24, 16))]
    exact = sum(gradients)
    missing = {}
    for steps in (1, 5, 30):
        applied, without, held = accumulated(compressor, gradients, steps)
        np.testing.assert_allclose(applied + held, steps * exact, rtol=1e-9, atol=1e-9)
        missing[steps] = np.abs(applied / steps - exact).max()
        forgotten = np.abs(without / steps - exact).max()
    np.testing.assert_allclose(forgotten, missing[1], rtol=1e-9)  # Without feedback it stays that of the first step.
    assert missing[30] < 0.5 * missing[5]
    assert missing[30] < 0.5 * missing[1]


@pytest.mark.parametrize(("compressor", "spacing"), [("HorovodCompressorEF", 2.0**-10), (WITH_FEEDBACK[1], 2.0**-7)])
def test_of_half_precision_what_the_sum_itself_rounds_is_not_fed_back(compressor, spacing):
    rng = np.random.default_rng(8)
    gradients = [rng.normal(size=(24, 16)), rng.normal(size=(24, 16))]
    steps = 30
    applied, without, held = accumulated(compressor, gradients, steps)
    missing = np.abs(applied + held - steps * sum(gradients))
    assert (missing <= steps * np.abs(sum(gradients)) * spacing).all(), "half of it, and of what rounding may add"
    assert np.sqrt(np.mean(missing**2)) < 0.8 * np.sqrt(np.mean((without - steps * sum(gradients)) ** 2))


@pytest.mark.parametrize("compressor", [*MODELS, "Int8Compressor"])
def test_what_is_infinite_or_no_number_is_seen_and_not_kept(compressor):
    rng = np.random.default_rng(6)
    shape = (24, 16)
    for bad in (np.inf, -np.inf, np.nan):
        cluster = Workers(compressor, [shape], 2)
        good = gradients_of(rng, [shape], 2)
        cluster.step(good)
        broken = [[own[0].copy()] for own in good]
        broken[1][0][3, 2] = bad
        assert not np.isfinite(cluster.step(broken)[0]).all()
        for _ in range(3):
            assert np.isfinite(cluster.step(good)[0]).all(), "the next steps are as if nothing had been"


@pytest.mark.parametrize("compressor", [*MODELS, "Int8Compressor", "NoneCompressor"])
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("shape", [(), (10,), (300,), (64, 48), (3, 3, 8, 16)])
def test_what_travels_has_the_bytes_that_the_plan_counts(compressor, dtype, shape):
    made = compressor_of(compressor, "compressor")
    if compressor == "NoneCompressor":
        assert made.wire_bytes(shape, dtype.size) == int(np.prod(shape)) * dtype.size
        return
    summed = []

    def total(value):
        summed.append(value)
        return value

    codec, dense = codec_of(made), Dense("v", shape, dtype)
    state = {
        name: tf.zeros(slot.shape, slot.dtype) if slot.initial is None else tf.constant(slot.initial())
        for name, slot in codec.init([dense])[0].items()
    }
    sent, _ = codec.compress([tf.ones(shape, dtype)], [state], Wire(0, 1, total))
    nbytes = sum(one.shape.num_elements() * one.dtype.size for one in [sent, *summed])
    assert nbytes == made.wire_bytes(shape, dtype.size)


def test_random_rounding_keeps_the_mean():
    cluster = Workers("Int8Compressor(block=4)", [(8,)], 1)
    own = np.array([1.0, 0.1234, -0.7, 0.001, -127.0, 3.3, 0.0, 90.5])
    mean = np.mean([cluster.step([[own]])[0] for _ in range(400)], axis=0)
    scales = np.repeat([1.0 / 127, 1.0], 4)
    # The mean of 400 numbers that differ by up to a scale: 5 standard deviations.
    assert (np.abs(mean - own) <= 5 * scales * 0.5 / np.sqrt(400)).all()


def test_workers_round_by_other_random_numbers_each_step():
    cluster = Workers("Int8Compressor", [(300,)], 1)
    two = Workers("Int8Compressor", [(300,)], 2)
    own = np.random.default_rng(7).normal(size=300)
    first, second = cluster.step([[own]])[0], cluster.step([[own]])[0]
    assert (first != second).any()
    assert (two.step([[own], [own]])[0] != 2 * first).any()


@pytest.mark.parametrize("half", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@given(data=st.data(), terms=st.integers(1, 5))
def test_a_sum_of_rounded_numbers_is_that_of_numpy_and_never_infinite(half, dtype, data, terms):
    values = data.draw(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=terms, max_size=terms))
    coded = [rounded(tf.constant(one, dtype), half, terms) for one in values]
    assert all(one.dtype == half for one in coded)
    total = coded[0]
    for one in coded[1:]:
        total = total + one
    assert np.isfinite(tf.cast(total, dtype)).all()
    kind = half.as_numpy_dtype
    largest = float(half.max) / terms / (1 + {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7}[half]) ** terms
    wanted = np.zeros(3, kind)
    for one in values:
        wanted = wanted + np.clip(np.array(one, dtype.as_numpy_dtype), -largest, largest).astype(kind)
    # TensorFlow takes each number below the smallest normal one for 0, where numpy does not.
    atol = terms * 1.2e-38
    np.testing.assert_allclose(total.numpy().astype(np.float64), wanted.astype(np.float64), rtol=0, atol=atol)


@pytest.mark.parametrize("compressor", ["HorovodCompressor", "HorovodCompressorEF(dtype='bfloat16')"])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_what_has_no_more_bytes_already_travels_as_it_is(compressor, dtype):
    value = tf.constant([1.001, 6e-8, 60000.0], dtype)
    np.testing.assert_array_equal(Workers(compressor, [(3,)], 1, dtype).step([[value]])[0], value)


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        ("HorovodCompressor(dtype='int8')", "must be one of float16, bfloat16; got 'int8'"),
        ("HorovodCompressor(rank=4)", "compressor HorovodCompressor has no parameter 'rank'; its para"),
        ("PowerSGDCompressor(rank=0)", "rank of PowerSGDCompressor must be an integer >= 1; got 0"),
        ("PowerSGDCompressor(rank=1.5)", "rank of PowerSGDCompressor must be an integer >= 1; got 1.5"),
        ("TopKCompressor(ratio=0)", "ratio of TopKCompressor is more than 0 and at most 1; got 0"),
        ("TopKCompressor(ratio=1.01)", "ratio of TopKCompressor is more than 0 and at most 1; got 1.01"),
        ("TopKCompressor(momentum=1)", "momentum of TopKCompressor is at least 0 and less than 1; got 1"),
        ("Int8Compressor(block=6)", "block of Int8Compressor must be a multiple of 4; got 6"),
        ("Gzip", "no compressor is called 'Gzip'; known: 'HorovodCompressor', 'HorovodCompressorEF', 'Int8Compressor'"),
        ("no.such:Module", "compressor 'no.such:Module' cannot be imported: No module named 'no'"),
        (
            "pathlib:PurePath",
            "pathlib:PurePath is no compressor, a frozen dataclass that has passes_through, gather",
        ),
    ],
)
def test_what_is_no_compressor_is_refused(compressor, message):
    with pytest.raises(StrategyError) as raised:
        compressor_of(compressor, "compressor")
    assert message in str(raised.value)


def test_momentum_correction_stands_for_the_optimizers_and_beside_it_counts_twice():
    """Of equal gradients an optimizer with momentum 0.5 moves twice as far as one without, once it is under way."""
    steps, elements = 400, 40
    moved = {}
    for correction in (0.0, 0.5):
        cluster = Workers(f"TopKCompressor(momentum={correction}, ratio=0.025)", [(elements,)], 1)
        totals = [cluster.step([[np.ones(elements)]])[0].sum() / elements for _ in range(steps)]
        for momentum in (0.0, 0.5):
            velocities = np.zeros(steps)
            for number, total in enumerate(totals):
                velocities[number] = momentum * velocities[number - 1] + total if number else total
            moved[correction, momentum] = velocities.sum()
    plain = moved[0.0, 0.0]
    for both, times in {(0.5, 0.0): 2, (0.0, 0.5): 2, (0.5, 0.5): 4}.items():
        # Less than a tenth is lost: what travels begins anew, and some has not travelled yet.
        assert moved[both] == pytest.approx(times * plain, rel=0.1)


@pytest.mark.parametrize("compressor", ["TopKCompressor", "Int8Compressor"])
def test_what_is_gathered_travels_by_rings_though_horovod_sums(compressor):
    item = kernel_programs.dense_and_sparse()
    sparse = {variable.name for variable in item.sparse_variables}
    config = tuple(
        VariableStrategy(
            one.name, AllReduceSynchronizer("HOROVOD", "NoneCompressor" if one.name in sparse else compressor)
        )
        for one in item.trainable_variables
    )
    program = kernel_programs.after(
        "lower-collectives", item, kernel_programs.topology(2, 1), Strategy(config, ("127.0.0.1:CPU:0",))
    )
    dense = [one for one in program.lowered.collectives if "dense gradients" in one.what]
    assert dense
    assert {program.graph.nodes[op].op for one in dense for op in one.ops} == {"CollectiveGatherV2"}


@pytest.mark.parametrize("spec", ["AUTO", "RING"])
@pytest.mark.parametrize(
    ("where", "travels"), [(kernel_programs.topology(2, 1), True), (kernel_programs.topology(2), False)]
)
def test_gradients_are_coded_where_they_travel_and_only_there(spec, where, travels):
    item = kernel_programs.dense_and_sparse()
    synchronizer = AllReduceSynchronizer(spec, "HorovodCompressor")
    config = tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables)
    program = kernel_programs.after("lower-collectives", item, where, Strategy(config, ("127.0.0.1:CPU:0",)))
    carried = {
        program.graph.nodes[op].attr["T"].type
        for one in program.lowered.collectives
        for op in one.ops
        if "dense gradients" in one.what
    }
    rounded_rows = [
        node.name
        for node in program.graph.nodes.values()
        if node.op == "Cast" and node.attr["DstT"].type == tf.float16.as_datatype_enum and "table" in node.name
    ]
    half = tf.float16.as_datatype_enum
    as_they_are = {tf.float32.as_datatype_enum, tf.float64.as_datatype_enum} if spec == "RING" else set()
    assert carried == ({half} if travels else as_they_are)
    assert len(rounded_rows) == (1 if travels else 0)
