"""`Strategy`: its id, its invariants, its wire form, its text."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.proto import strategy_pb2 as pb
from autodist_py.proto.compressors import COMPRESSORS, text_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import ALL_REDUCE_SPECS, AllReduceSynchronizer, PSSynchronizer

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
numbers = st.integers(0, 2**31 - 1)
compressors = st.sampled_from([*COMPRESSORS, "HorovodCompressor(dtype='bfloat16')"])
seconds = st.floats(0, 1e6)
flags = st.sampled_from([None, True, False])
synchronizers = st.builds(
    AllReduceSynchronizer, st.sampled_from(ALL_REDUCE_SPECS), compressors, numbers, numbers, seconds, flags
) | st.builds(PSSynchronizer, names, st.booleans(), st.booleans(), numbers, numbers, compressors, numbers)


@st.composite
def nodes(draw):
    shards = draw(st.integers(1, 3))
    parts = (
        draw(st.lists(st.builds(VariableStrategy, names, synchronizers), min_size=shards, max_size=shards))
        if shards > 1
        else []
    )
    return VariableStrategy(
        draw(names),
        draw(st.none() | synchronizers) if parts else draw(synchronizers),
        partitioner=f"1,{shards}" if shards > 1 else "",
        part_config=tuple(parts),
    )


strategies = st.builds(
    Strategy,
    st.lists(nodes(), max_size=4, unique_by=lambda node: node.var_name).map(tuple),
    st.lists(names, min_size=1, max_size=3, unique=True).map(tuple),
    path=st.text(max_size=5),
)


@given(strategies)
def test_a_strategy_survives_the_wire(strategy):
    wire = strategy.to_proto().SerializeToString()
    assert Strategy.from_proto(pb.Strategy.FromString(wire)) == strategy


@given(strategies, strategies)
def test_ids_are_equal_when_all_but_the_path_is(one, other):
    assert (replace(one, path="") == replace(other, path="")) == (one.id == other.id)
    assert replace(one, path="elsewhere").id == one.id


@given(strategy=strategies, suffix=st.sampled_from([".pb", ".json"]))
def test_a_saved_strategy_loads_as_it_was_and_knows_where_it_is(tmp_path_factory, strategy, suffix):
    path = tmp_path_factory.mktemp("strategy") / f"strategy{suffix}"
    saved = strategy.save(path)
    assert saved == replace(strategy, path=str(path))
    assert Strategy.load(path) == saved


@given(strategies)
def test_every_strategy_prints(strategy):
    assert strategy.id[:12] in str(strategy)


@pytest.fixture
def strategy():
    return Strategy(
        node_config=(
            VariableStrategy("kernel", AllReduceSynchronizer(spec="RING", compressor="HorovodCompressorEF", group=1)),
            VariableStrategy(
                "bias", PSSynchronizer("10.0.0.1:CPU:0", sync=False, staleness=2, replicas_to_aggregate=1)
            ),
            VariableStrategy(
                "table",
                None,
                partitioner="2,1",
                part_config=(
                    VariableStrategy("table/0", PSSynchronizer("10.0.0.1:CPU:0")),
                    VariableStrategy("table/1", PSSynchronizer("10.0.0.2:CPU:0")),
                ),
            ),
        ),
        replicas=("10.0.0.1:GPU:0", "10.0.0.2:GPU:0"),
    )


def test_the_text_form_says_what_is_given_up(strategy):
    lines = str(strategy).splitlines()
    assert lines[0].endswith("3 variables, 2 replicas")
    assert lines[2:] == [
        "replicas: 10.0.0.1:GPU:0, 10.0.0.2:GPU:0",
        "",
        "variable   synchronizer        group  compressor           partitioner",
        "kernel     AllReduce(RING)     1      HorovodCompressorEF  -",
        "bias       PS(10.0.0.1:CPU:0)  0      -                    -",
        "table      -                   -      -                    2,1",
        "  shard 0  PS(10.0.0.1:CPU:0)  0      -                    -",
        "  shard 1  PS(10.0.0.2:CPU:0)  0      -                    -",
        "",
        "gives up, compared with one device on the global batch:",
        "  kernel: gradients are rounded to half precision, and the error is added to the next step's",
        "  bias: asynchronous: gradients are applied as they arrive, computed from older values",
        "  bias: staleness: a worker may run 2 steps ahead of the slowest",
        "  bias: backup workers: an update waits for 1 gradient of 2 workers, and drops those that come later",
    ]


def test_a_synchronous_lossless_strategy_gives_up_nothing():
    assert "gives up nothing" in str(Strategy((VariableStrategy("w", AllReduceSynchronizer()),), ("127.0.0.1:CPU:0",)))


def test_waiting_for_every_worker_gives_up_nothing():
    node = VariableStrategy("w", PSSynchronizer("a:CPU:0", replicas_to_aggregate=2))
    assert "gives up nothing" in str(Strategy((node,), ("a:CPU:0", "b:CPU:0")))


def test_a_node_is_found_by_its_variable(strategy):
    assert strategy.node("bias").var_name == "bias"
    with pytest.raises(StrategyError, match=r"says nothing of variable 'biass'; did you mean 'bias'\?"):
        strategy.node("biass")


def test_content_that_does_not_match_its_id_is_refused(strategy):
    message = strategy.to_proto()
    message.node_config[0].AllReduceSynchronizer.group = 7
    with pytest.raises(StrategyError, match="the content was edited or damaged"):
        Strategy.from_proto(message)
    message.id = ""
    assert Strategy.from_proto(message).node("kernel").synchronizers[0].group == 7


def test_an_enum_number_from_elsewhere_is_refused():
    message = pb.Strategy(graph_config={"replicas": ["a:CPU:0"]})
    node = message.node_config.add(var_name="w")
    node.AllReduceSynchronizer.ParseFromString(b"\x10\x63")  # compressor: 99
    with pytest.raises(StrategyError, match="no Compressor has number 99"):
        Strategy.from_proto(message)


def test_a_partitioner_may_be_written_with_spaces():
    spaced, plain = (VariableStrategy("w", AllReduceSynchronizer(), text) for text in (" 1, 2 ,1\t", "1,2,1"))
    assert spaced == plain
    assert (spaced.axis, spaced.num_shards) == (1, 2)
    assert Strategy((spaced,), ("a:CPU:0",)).id == Strategy((plain,), ("a:CPU:0",)).id


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllReduceSynchronizer(spec="TREE"), "must be one of AUTO, NCCL, RING, HOROVOD; got 'TREE'"),
        (lambda: AllReduceSynchronizer(local="tree"), "must be one of one_device, hierarchical, nccl; got 'tree'"),
        (
            lambda: AllReduceSynchronizer("NCCL", local="nccl"),
            "got local='nccl' with NCCL, by which every replica is a member. Leave one of them out",
        ),
        (lambda: AllReduceSynchronizer(compressor="Zip"), "no compressor is called 'Zip'; known: 'HorovodCompressor'"),
        (lambda: AllReduceSynchronizer(group=-1), "group of an AllReduce synchronizer must be an integer from 0"),
        (lambda: PSSynchronizer(""), "needs a reduction_destination"),
        (lambda: PSSynchronizer("a:CPU:0", staleness=-1), "staleness of a PS synchronizer"),
        (lambda: VariableStrategy("", AllReduceSynchronizer()), "name of a variable"),
        (lambda: VariableStrategy("w", None), "'w' needs a synchronizer"),
        (lambda: VariableStrategy("w", AllReduceSynchronizer(), partitioner="2x1"), "number of shards per axis"),
        (lambda: VariableStrategy("w", AllReduceSynchronizer(), partitioner="0"), "number of shards per axis"),
        (
            lambda: VariableStrategy("w", AllReduceSynchronizer(), partitioner="9" * 5000),
            "shards per axis, five digits at most",
        ),
        (lambda: VariableStrategy("w", AllReduceSynchronizer(), partitioner="2,2"), "along one axis only"),
        (lambda: VariableStrategy("w", AllReduceSynchronizer(), partitioner="1 2"), "number of shards per axis"),
        (
            lambda: VariableStrategy("w", None, "3", (VariableStrategy("w/0", AllReduceSynchronizer()),) * 2),
            "one part_config per shard",
        ),
        (
            lambda: VariableStrategy("w", None, "1,1", (VariableStrategy("w/0", AllReduceSynchronizer()),)),
            "cut into two shards at least; got partitioner '1,1' for variable 'w'",
        ),
        (
            lambda: VariableStrategy("w", None, "", (VariableStrategy("w/0", AllReduceSynchronizer()),)),
            "two shards at least; got partitioner ''",
        ),
        (lambda: VariableStrategy("w", AllReduceSynchronizer(), "1,1"), "two shards at least; got partitioner '1,1'"),
        (
            lambda: VariableStrategy("w", AllReduceSynchronizer(), part_sizes=(3,)),
            "two shards at least; got partitioner ''",
        ),
        (lambda: Strategy((), ()), "at least one replica"),
        (lambda: Strategy((), ("a:CPU:0", "a:CPU:0")), "one replica at most; repeated: a:CPU:0"),
        (
            lambda: Strategy((VariableStrategy("w", AllReduceSynchronizer()),) * 2, ("a:CPU:0",)),
            "one node per variable; repeated: w",
        ),
    ],
)
def test_a_malformed_strategy_is_refused(make, message):
    with pytest.raises(StrategyError, match=message):
        make()


@pytest.mark.parametrize("kind", [AllReduceSynchronizer, lambda **given: PSSynchronizer("a:CPU:0", **given)])
@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        (" NoneCompressor", "NoneCompressor"),
        ("HorovodCompressor()", "HorovodCompressor"),
        ("HorovodCompressor(dtype='float16')", "HorovodCompressor"),
        ('HorovodCompressor( dtype="bfloat16" )', "HorovodCompressor(dtype='bfloat16')"),
    ],
)
def test_equal_compressors_are_written_alike_and_survive_the_wire(kind, written, canonical):
    synchronizer = kind(compressor=written)
    assert text_of(synchronizer.compressor) == canonical
    assert synchronizer == kind(compressor=synchronizer.compressor)
    assert type(synchronizer).from_proto(synchronizer.to_proto()) == synchronizer
