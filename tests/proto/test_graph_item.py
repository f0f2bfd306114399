"""`GraphItem`: its invariants, its wire form, its text."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.proto import graphitem_pb2 as pb
from autodist_py.proto.errors import GraphItemError
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Output, Statistic, Variable

names = st.text(st.characters(codec="utf-8", exclude_characters=";"), min_size=1, max_size=8)
sizes = st.integers(0, 2**40)
partial_shapes = st.none() | st.lists(st.none() | sizes, min_size=1, max_size=3).map(tuple)


@st.composite
def graph_items(draw):
    variables = draw(
        st.lists(
            st.builds(
                Variable,
                name=names,
                dtype=st.sampled_from(["float32", "int64", "string"]),
                shape=st.lists(st.integers(0, 2**21 - 1), max_size=3).map(tuple),
                trainable=st.booleans(),
                aggregation=st.sampled_from(["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]),
                update_ops=st.lists(names, max_size=2).map(tuple),
                definition=st.binary(max_size=8),
                per_replica=st.booleans(),
            ),
            max_size=4,
            unique_by=lambda variable: variable.name,
        )
    )
    reductions = st.sampled_from(["", "mean", "sum"])
    tensors = st.lists(names, min_size=1, max_size=1) | st.lists(names, min_size=3, max_size=3)
    scalars = {one.name for one in variables if not one.shape}
    gradients = st.lists(
        st.builds(
            Gradient,
            st.sampled_from([one.name for one in variables] or ["none"]),
            tensors.map(tuple),
            st.sampled_from(["", "mean"]),
            in_parts=st.booleans(),
        )
        | st.builds(
            Gradient,
            st.sampled_from([one.name for one in variables] or ["none"]),
            tensors.map(tuple),
            reductions | st.just("add"),
        ),
        max_size=4 if variables else 0,
        unique_by=lambda gradient: (gradient.key, gradient.variable),
    ).map(lambda those: [one for one in those if not (one.is_sparse and one.variable in scalars)])
    statistics = st.lists(
        st.builds(
            Statistic,
            names,
            st.just("float64"),
            st.lists(st.none() | st.integers(0, 4), max_size=2).map(tuple),
            st.sampled_from(["sum", "mean", "add", "rows", "share", "part"]),
        ),
        max_size=2,
        unique_by=lambda one: one.tensor,
    )
    inputs = st.lists(
        st.builds(
            Input,
            names,
            st.just("int32"),
            partial_shapes,
            batched=st.booleans(),
            kind=st.sampled_from(["feed", "state"]),
        )
        | st.builds(Input, names, st.just("int32"), st.just((None, 2)), batched=st.just(True), batch=st.integers(0, 3))
        | st.builds(Input, names, st.just("int32"), partial_shapes, batched=st.just(False), kind=st.just("part")),
        max_size=2,
        unique_by=lambda one: one.name,
    )
    outputs = st.builds(Output, names, st.just("float32"), partial_shapes, reductions) | st.builds(
        Output, names, st.just("float32"), partial_shapes, per_replica=st.just(True)
    )
    marked = draw(st.lists(names, max_size=2))
    return GraphItem(
        graph_def=draw(st.binary(max_size=32)),
        variables=tuple(variables),
        gradients=tuple(draw(gradients)),
        inputs=tuple(draw(inputs)),
        outputs=tuple(draw(st.lists(outputs, max_size=2))),
        run_ops=tuple(draw(st.lists(names, max_size=2))),
        loss_reduction=draw(st.sampled_from(["mean", "sum"])),
        table_initializers=tuple(draw(st.lists(names, max_size=2))),
        savers=tuple(draw(st.lists(st.binary(max_size=8), max_size=2))),
        statistics=tuple(draw(statistics)),
        local_ops=tuple(marked),
        inseparable_ops=tuple(marked[:1]),
        normalizing_ops=tuple(marked[1:]),
        mixtures=tuple(reversed(marked)),
    )


@given(graph_items())
def test_a_graph_item_survives_the_wire(item):
    wire = item.to_proto().SerializeToString()
    assert GraphItem.from_proto(pb.GraphItem.FromString(wire)) == item


@given(graph_items())
def test_equal_graph_items_have_equal_fingerprints(item):
    assert GraphItem.from_proto(item.to_proto()).fingerprint == item.fingerprint


@given(graph_items(), graph_items())
def test_different_graph_items_have_different_fingerprints(one, other):
    assert (one == other) == (one.fingerprint == other.fingerprint)


@given(item=graph_items(), suffix=st.sampled_from([".pb", ".json"]))
def test_a_saved_graph_item_loads_as_it_was(tmp_path_factory, item, suffix):
    path = tmp_path_factory.mktemp("item") / f"item{suffix}"
    item.save(path)
    assert GraphItem.load(path) == item


@given(graph_items())
def test_every_graph_item_prints(item):
    assert item.fingerprint[:12] in str(item)


@pytest.fixture
def item():
    return GraphItem(
        graph_def=b"graph",
        variables=(
            Variable("count", "int64", (), trainable=False),
            Variable("dense/kernel", "float32", (3, 4)),
            Variable("table", "bfloat16", (100, 8)),
        ),
        gradients=(Gradient("table", ("i:0", "v:0", "s:0")), Gradient("dense/kernel", ("g:0",))),
        inputs=(
            Input("x", "float32", (None, 3), batched=True),
            Input("rate", "float32", (), batched=False, kind="state"),
        ),
        outputs=(Output("loss:0", "float32", ()),),
        run_ops=("train",),
    )


def test_trainable_variables_are_those_with_a_gradient_in_variable_order(item):
    assert [variable.name for variable in item.trainable_variables] == ["dense/kernel", "table"]


def test_sparse_variables_are_those_with_a_sparse_gradient(item):
    assert [variable.name for variable in item.sparse_variables] == ["table"]


def test_the_wire_form_keys_a_sparse_gradient_by_its_three_tensors(item):
    assert dict(item.to_proto().grad_target_pairs) == {"i:0;v:0;s:0": "table", "g:0": "dense/kernel"}


def test_one_tensor_may_be_the_gradient_of_two_variables(item):
    shared = replace(item, gradients=(Gradient("table", ("g:0",)), Gradient("dense/kernel", ("g:0",))))
    message = shared.to_proto()
    assert dict(message.grad_target_pairs) == {"g:0": "table"}
    assert GraphItem.from_proto(message) == shared


def test_an_opaque_part_carries_its_tensorflow_type(item):
    message = item.to_proto()
    assert message.graph_def.type_url == "type.googleapis.com/tensorflow.GraphDef"
    assert {one.type_url for one in message.info.variables} == {"type.googleapis.com/tensorflow.VariableDef"}


def test_a_variable_knows_its_size(item):
    table = item.variable("table")
    assert (table.num_elements, table.nbytes) == (800, 1600)


def test_the_text_form_is_a_table_per_kind(item):
    lines = str(item).splitlines()
    assert lines[0].endswith("3 variables, 2 gradients, graph of 5 bytes, loss_reduction mean")
    assert lines[2:] == [
        "variable      dtype     shape     gradient  aggregation",
        "count         int64     ()        -         NONE",
        "dense/kernel  float32   (3, 4)    dense     NONE",
        "table         bfloat16  (100, 8)  sparse    NONE",
        "",
        "input  dtype    shape   batched  kind",
        "x      float32  (?, 3)  yes      feed",
        "rate   float32  ()      no       state",
        "",
        "output  dtype    shape  over examples",
        "loss:0  float32  ()     -",
        "",
        "statistic  dtype  shape  combined by",
        "",
        "runs each step: train",
        "",
        "mixes each replica's own examples: -",
        "",
        "may mix each replica's own examples: -",
        "",
        "normalizes each replica's own examples: -",
        "",
        "may count a regularizer once per replica: -",
    ]


def test_an_unknown_variable_is_answered_with_the_nearest_name(item):
    with pytest.raises(GraphItemError, match=r"no variable 'dense/kernal'; did you mean 'dense/kernel'\?"):
        item.variable("dense/kernal")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradients": (Gradient("tabel", ("g:0",)),)}, "'tabel', which the graph item lacks; did you mean 'table'"),
        ({"gradients": (Gradient("table", ("g:0",)),) * 2}, "each gradient of a graph item is named once"),
        ({"variables": (Variable("w", "float32", ()),) * 2, "gradients": ()}, "repeated: w"),
        ({"inputs": (Input("x", "float32", None, batched=True),) * 2}, "each input of a graph item is named once"),
        (
            {"variables": (Variable("w", "float32", ()),), "gradients": (Gradient("w", ("i:0", "v:0", "s:0")),)},
            "variable 'w' has none: it is a scalar",
        ),
        ({"loss_reduction": "avg"}, "loss_reduction must be one of mean, sum; got 'avg'"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(item, change, message):
    with pytest.raises(GraphItemError, match=message):
        replace(item, **change)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gradient("w", ("i:0", "v:0")), "one tensor"),
        (lambda: Gradient("w", ("",)), "one tensor"),
        (lambda: Gradient("w", ("g:0",), "sum", in_parts=True), "'w' has the reduction 'sum', and is in_parts"),
        (lambda: Variable("", "float32", ()), "must not be empty"),
        (lambda: Variable("w", "float32", (-1,)), "static shape"),
        (lambda: Variable("w", "float32", (2**62, 2**62)), "of 254 axes and 9223372036854775807 elements at most"),
        (lambda: Variable("w", "float32", (2**62,) * 100_000), "needs a static shape, of 254 axes"),
        (lambda: Variable("w", "float32", (), aggregation="AVG"), "must be one of NONE, SUM"),
        (lambda: Input("x", "float32", (), batched=True), "needs a first dimension"),
        (lambda: Input("x", "float32", None, batched=True, kind="fed"), "must be one of feed, state"),
        (lambda: Input("x", "float32", (None,), batched=False, batch=1), "only a batched input is of another"),
        (lambda: Input("x", "float32", (None,), batched=True, batch=-1), "batches are numbered from 0"),
        (lambda: Output("", "float32", None), "must not be empty"),
    ],
)
def test_a_malformed_part_is_refused(make, message):
    with pytest.raises(GraphItemError, match=message):
        make()


def test_a_message_without_a_graph_def_is_refused():
    with pytest.raises(GraphItemError, match=r"holds a type.googleapis.com/tensorflow.GraphDef, got type ''"):
        GraphItem.from_proto(pb.GraphItem())


def test_gradients_that_contradict_the_map_are_refused(item):
    message = item.to_proto()
    message.grad_target_pairs["other:0"] = "table"
    with pytest.raises(GraphItemError, match="must name the same gradients"):
        GraphItem.from_proto(message)
