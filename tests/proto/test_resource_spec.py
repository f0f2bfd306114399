"""`ResourceSpec`: ranks, devices, wire form, text. Its rules are tested through the YAML (`tests/config`)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.config.resource_spec import parse_resource_spec
from autodist_py.proto import resourcespec_pb2 as pb
from autodist_py.proto.errors import ResourceSpecError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec, SSHConfig

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
environments = st.dictionaries(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3),
    max_size=2,
)
indices = st.lists(st.integers(0, 2**31 - 1), max_size=3, unique=True).map(tuple)


@st.composite
def resource_specs(draw):
    ssh = draw(
        st.dictionaries(
            texts,
            st.builds(
                SSHConfig,
                st.from_regex(r"[\w.@$][\w.@$-]{0,2}", fullmatch=True),
                st.integers(1, 65535),
                st.none() | texts,
                st.none() | texts,
                environments.map(lambda envs: tuple(envs.items())),
            ),
            max_size=2,
        )
    )
    count = draw(st.integers(1, 4))
    chief = draw(st.integers(0, count - 1))
    return ResourceSpec(
        nodes=tuple(
            NodeSpec(
                address=f"10.0.0.{index}",
                gpus=draw(indices),
                cpus=draw(indices.filter(len)),
                chief=index == chief,
                ssh_config=draw(st.none() | st.sampled_from(sorted(ssh))) if ssh else None,
                network_bandwidth=draw(st.floats(min_value=0, exclude_min=True, allow_infinity=False)),
            )
            for index in range(count)
        ),
        ssh=tuple(ssh.items()),
    )


@given(resource_specs())
def test_a_resource_spec_survives_the_wire(spec):
    wire = spec.to_proto().SerializeToString()
    assert ResourceSpec.from_proto(pb.ResourceSpec.FromString(wire)) == spec


@given(resource_specs())
def test_a_resource_spec_survives_its_yaml(spec):
    assert parse_resource_spec(spec.to_yaml()) == spec


@given(spec=resource_specs(), suffix=st.sampled_from([".pb", ".json"]))
def test_a_saved_resource_spec_loads_as_it_was(tmp_path_factory, spec, suffix):
    path = tmp_path_factory.mktemp("spec") / f"spec{suffix}"
    spec.save(path)
    assert ResourceSpec.load(path) == spec


@given(resource_specs(), resource_specs())
def test_fingerprints_are_equal_when_specs_are(one, other):
    assert (one == other) == (one.fingerprint == other.fingerprint)


@pytest.fixture
def spec():
    return ResourceSpec(
        nodes=(
            NodeSpec("10.0.0.1", cpus=(2, 1)),
            NodeSpec("10.0.0.2", gpus=(1, 0), chief=True, ssh_config="lab", network_bandwidth=10),
        ),
        ssh=(("lab", SSHConfig("ada", shared_envs=(("B", "2"), ("A", "1")))),),
    )


def test_the_chief_has_rank_0_and_the_others_follow_in_order(spec):
    assert [node.address for node in spec.workers] == ["10.0.0.2", "10.0.0.1"]
    assert spec.chief.address == "10.0.0.2"


def test_replicas_are_on_gpus_where_there_are_any_else_on_cpus_by_rank_and_index(spec):
    assert spec.replica_devices == ("10.0.0.2:GPU:0", "10.0.0.2:GPU:1", "10.0.0.1:CPU:1", "10.0.0.1:CPU:2")


def test_servers_are_the_first_cpu_of_each_node(spec):
    assert spec.server_devices == ("10.0.0.2:CPU:0", "10.0.0.1:CPU:0")


def test_cpu_0_is_always_a_device(spec):
    assert "10.0.0.1:CPU:0" in spec.devices


def test_an_ssh_group_is_found_by_its_node(spec):
    assert spec.ssh_config(spec.chief) == SSHConfig("ada", shared_envs=(("A", "1"), ("B", "2")))
    assert spec.ssh_config(spec.workers[1]) == SSHConfig()


def test_a_single_node_is_the_chief():
    assert ResourceSpec((NodeSpec("127.0.0.1"),)).chief == NodeSpec("127.0.0.1", chief=True)


@pytest.mark.parametrize(
    ("address", "is_local"), [("127.0.0.9", True), ("localhost", True), ("::1", True), ("host", False)]
)
def test_loopback_addresses_are_local(address, is_local):
    assert ResourceSpec((NodeSpec(address),)).is_local == is_local


def test_the_text_form_is_a_table_by_rank(spec):
    lines = str(spec).splitlines()
    assert lines[0].endswith("2 nodes, 4 replicas")
    assert lines[2:] == [
        "rank       node      replicas     bandwidth  ssh",
        "0 (chief)  10.0.0.2  GPU:0 GPU:1  10 Gbit/s  lab",
        "1          10.0.0.1  CPU:1 CPU:2  1 Gbit/s   -",
    ]


def test_an_empty_spec_is_refused():
    with pytest.raises(ResourceSpecError, match="at least one node"):
        ResourceSpec(())
