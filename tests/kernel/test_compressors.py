"""What travels instead of a gradient: equal to a model of it in numpy."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.kernel.compressors.coding import coding_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.strategy import Node, Strategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from tests.kernel import programs

BFLOAT16 = "HorovodCompressor(dtype='bfloat16')"
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(("compressor", "half"), [("HorovodCompressor", tf.float16), (BFLOAT16, tf.bfloat16)])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@given(data=st.data(), terms=st.integers(1, 5))
def test_a_sum_of_rounded_numbers_is_that_of_numpy_and_never_infinite(compressor, half, dtype, data, terms):
    values = data.draw(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=terms, max_size=terms))
    coding = coding_of(compressor, dtype)
    coded = [coding.compress(tf.constant(one, dtype), terms) for one in values]
    assert all(one.dtype == half for one in coded)
    total = coded[0]
    for one in coded[1:]:
        total = total + one
    result = coding.decompress(total, dtype)
    assert result.dtype == dtype
    assert np.isfinite(result).all()
    kind = half.as_numpy_dtype
    largest = float(half.max) / terms / (1 + {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7}[half]) ** terms
    wanted = np.zeros(3, kind)
    for one in values:
        wanted = wanted + np.clip(np.array(one, dtype.as_numpy_dtype), -largest, largest).astype(kind)
    np.testing.assert_array_equal(result, wanted.astype(dtype.as_numpy_dtype))


@pytest.mark.parametrize("compressor", ["HorovodCompressor", BFLOAT16])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_what_has_no_more_bytes_already_travels_as_it_is(compressor, dtype):
    value = tf.constant([1.001, 6e-8, 60000.0], dtype)
    coding = coding_of(compressor, dtype)
    np.testing.assert_array_equal(coding.compress(value, 3), value)
    assert coding.dtype == dtype


@pytest.mark.parametrize("compressor", ["HorovodCompressor", BFLOAT16])
def test_what_is_infinite_or_no_number_stays_so(compressor):
    coding = coding_of(compressor, tf.float32)
    given = tf.constant([np.inf, -np.inf, np.nan, 1.0])
    np.testing.assert_array_equal(coding.decompress(coding.compress(given, 4), tf.float32), given)


@pytest.mark.parametrize(
    ("compressor", "dtype", "message"),
    [
        ("HorovodCompressor", tf.int32, "HorovodCompressor rounds floats, and cannot code int32; use NoneCompressor"),
        ("PowerSGDCompressor", tf.float32, "compressor 'PowerSGDCompressor' is not available yet; use HorovodComp"),
        ("HorovodCompressor(dtype='int8')", tf.float32, "must be one of float16, bfloat16; got 'int8'"),
        ("HorovodCompressor(rank=4)", tf.float32, "compressor HorovodCompressor has no parameter 'rank'; its para"),
        ("Gzip", tf.float32, "must be one of NoneCompressor, HorovodCompressor, HorovodCompressorEF, PowerSGD"),
    ],
)
def test_what_cannot_be_coded_is_refused(compressor, dtype, message):
    with pytest.raises(StrategyError) as raised:
        coding_of(compressor, dtype)
    assert message in str(raised.value)


@pytest.mark.parametrize("spec", ["AUTO", "RING"])
@pytest.mark.parametrize(("where", "travels"), [(programs.place(2, 1), True), (programs.place(2), False)])
def test_gradients_are_coded_where_they_travel_and_only_there(spec, where, travels):
    item = programs.dense_and_sparse()
    synchronizer = AllReduceSynchronizer(spec, "HorovodCompressor")
    config = tuple(Node(one.name, synchronizer) for one in item.trainable_variables)
    program = programs.after("synchronize", item, where, Strategy(config, ("127.0.0.1:CPU:0",)))
    carried = {
        program.graph.nodes[op].attr["T"].type
        for launch in program.launches
        for op in launch.ops
        if "gradients" in launch.what and program.graph.nodes[op].op == "CollectiveReduceV2"
    }
    rows = {
        program.graph.nodes[op].attr["T"].type
        for launch in program.launches
        for op in launch.ops
        if "sparse gradients" in launch.what
    }
    half, int64 = tf.float16.as_datatype_enum, tf.int64.as_datatype_enum
    as_they_are = {tf.float32.as_datatype_enum, tf.float64.as_datatype_enum} if spec == "RING" else set()
    assert carried == ({half} if travels else as_they_are)
    assert rows == ({half, int64} if travels else set())
