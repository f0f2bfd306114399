"""The user's YAML: what it means, and what each mistake is answered with."""

import pytest

from autodist_py.cluster.exit_hooks import one_line
from autodist_py.config.resource_spec import (
    first_difference,
    load_resource_spec,
    local_resource_spec,
    parse_resource_spec,
    spec_lines,
    this_machine,
)
from autodist_py.proto.errors import ClusterError, ResourceSpecError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec, SSHConfig

WHOLE = """
nodes:
  - address: 10.0.0.1
    gpus: [0, 1]
    chief: true
    network_bandwidth: 100
  - address: worker.example.org
    cpus: [0, 1]
    ssh_config: lab
ssh:
  lab:
    username: ada
    port: 2222
    key_file: ~/.ssh/lab
    python_venv: /opt/venv
    shared_envs: {LD_LIBRARY_PATH: /opt/lib}
"""


def test_every_key_reaches_the_spec():
    assert parse_resource_spec(WHOLE) == ResourceSpec(
        nodes=(
            NodeSpec("10.0.0.1", gpus=(0, 1), chief=True, network_bandwidth=100.0),
            NodeSpec("worker.example.org", cpus=(0, 1), ssh_config="lab"),
        ),
        ssh=(("lab", SSHConfig("ada", 2222, "~/.ssh/lab", "/opt/venv", (("LD_LIBRARY_PATH", "/opt/lib"),))),),
    )


def test_an_address_is_enough():
    assert parse_resource_spec("nodes: [{address: 127.0.0.1}]") == local_resource_spec(1)


def test_anchors_and_merge_keys_work():
    spec = parse_resource_spec(
        "nodes: [&first {address: a, cpus: [0, 1], chief: true}, {<<: *first, address: b, chief: false}]"
    )
    assert spec.replica_devices == ("a:CPU:0", "a:CPU:1", "b:CPU:0", "b:CPU:1")


@pytest.mark.parametrize("suffix", [".yml", ".yaml", ".json", ".pb"])
def test_a_saved_spec_loads_as_it_was(tmp_path, suffix):
    spec = parse_resource_spec(WHOLE)
    path = tmp_path / f"spec{suffix}"
    spec.save(path)
    assert load_resource_spec(path) == spec


TWO = "nodes: [{address: 10.0.0.1, chief: true}, {address: 10.0.0.2%s}]"


@pytest.mark.parametrize(
    ("text", "path", "parts"),
    [
        # The file as a whole.
        ("", "the resource spec is empty", ["write at least"]),
        ("- a\n- b", "the whole file", ["is a map", "['a', 'b']"]),
        ("nodes: [", "not YAML", ["line 1"]),
        ("!!python/object:os.system {}", "not YAML", ["could not determine a constructor"]),
        ("ssh: {}", "nodes", ["required"]),
        ("nodes: []", "nodes", ["at least one node"]),
        ("nodes: {address: a}", "nodes", ["is a list", "{'address': 'a'}"]),
        ("nodes: [a]", "nodes[0]", ["'a'", "- address:"]),
        ("nodes: [{address: a}]\nnodes: [{address: b}]", "line 1", ["'nodes' comes twice"]),
        # Unknown keys.
        ("nodes: [{address: a}]\nnode: []", "node", ["no such key", "did you mean 'nodes'?"]),
        (TWO % ", gpu: [0]", "nodes[1].gpu", ["no such key", "[0]", "did you mean 'gpus'?"]),
        (TWO % "" + "\nssh: {lab: {user: ada}}", "ssh.lab.user", ["no such key", "did you mean 'username'?"]),
        # Wrong types.
        ("nodes: [{gpus: [0]}]", "nodes[0].address", ["required"]),
        ("nodes: [{address: 10.0}]", "nodes[0].address", ["10.0", "in quotes"]),
        (TWO % ", gpus: [a]", "nodes[1].gpus[0]", ["'a'", "such as [0, 1]"]),
        (TWO % ", gpus: 2", "nodes[1].gpus", ["2", "such as [0, 1]"]),
        (TWO % ", cpus: [true]", "nodes[1].cpus[0]", ["True"]),
        (TWO % ", chief: 'yes'", "nodes[1].chief", ["'yes'", "without quotes"]),
        (TWO % ", network_bandwidth: 10Gbit", "nodes[1].network_bandwidth", ["'10Gbit'", "without a unit"]),
        (TWO % "" + "\nssh: {lab: {port: '22'}}", "ssh.lab.port", ["'22'", "without quotes"]),
        (TWO % "" + "\nssh: {lab: {shared_envs: {A: 1}}}", "ssh.lab.shared_envs.A", ["1", "in quotes"]),
        # Values out of range.
        (TWO % ", gpus: [0, 0]", "nodes[1].gpus[1]", ["each named once", "got 0"]),
        (TWO % ", gpus: [-1]", "nodes[1].gpus[0]", [">= 0", "got -1"]),
        (TWO % ", gpus: [99999999999]", "nodes[1].gpus[0]", ["got 99999999999"]),
        (TWO % ", cpus: []", "nodes[1].cpus", ["at least one CPU", "[0]"]),
        (TWO % ", network_bandwidth: 0", "nodes[1].network_bandwidth", ["> 0"]),
        (TWO % ", network_bandwidth: .nan", "nodes[1].network_bandwidth", ["> 0"]),
        ("nodes: [{address: 'a b'}]", "nodes[0].address", ["'a b'", "host name"]),
        ("nodes: [{address: '10.0.0.1:22'}]", "nodes[0].address", ["without a port"]),
        ("nodes: [{address: -oProxyCommand}]", "nodes[0].address", ["host name"]),
        (TWO % "" + "\nssh: {lab: {port: 70000}}", "ssh.lab.port", ["70000", "65535"]),
        (TWO % "" + "\nssh: {'': {}}", "ssh", ["has a name"]),
        (TWO % "" + "\nssh: {lab: {shared_envs: {A=B: c}}}", "ssh.lab.shared_envs", ["'A=B'", "LD_LIBRARY_PATH"]),
        (TWO % "" + '\nssh: {lab: {shared_envs: {A: "\\0"}}}', "ssh.lab.shared_envs.A", ["NUL", "leave it out"]),
        # Contradictions.
        ("nodes: [{address: a, chief: true}, {address: a}]", "nodes[1].address", ["'a'", "nodes[0]"]),
        (TWO % ", chief: true", "nodes[1].chief", ["one node is the chief", "nodes[0]"]),
        ("nodes: [{address: a}, {address: b}]", "nodes[*].chief", ["none of 2 is", "chief: true"]),
        (TWO % ", ssh_config: lab", "nodes[1].ssh_config", ["'lab'", "add an `ssh` section"]),
        (TWO % ", ssh_config: lap" + "\nssh: {lab: {}}", "nodes[1].ssh_config", ["did you mean 'lab'?"]),
        (
            "nodes: [{address: 10.0.0.1, chief: true}, {address: 127.0.0.1}]",
            "nodes[1].address",
            ["do not mix", "network address"],
        ),
    ],
)
def test_a_mistake_is_answered_with_its_path_value_and_fix(tmp_path, text, path, parts):
    file = tmp_path / "spec.yml"
    file.write_text(text)
    with pytest.raises(ResourceSpecError) as refusal:
        load_resource_spec(file)
    message = str(refusal.value)
    assert message.startswith(f"{file}: {path}:") or message.startswith(f"{file}: {path};")
    for part in parts:
        assert part in message


def test_all_mistakes_of_the_schema_are_told_at_once():
    with pytest.raises(ResourceSpecError) as refusal:
        parse_resource_spec("nodes: [{address: 1, gpu: [0]}]\nssh: []")
    assert [line.split(":")[0] for line in str(refusal.value).splitlines()] == [
        "nodes[0].address",
        "nodes[0].gpu",
        "ssh",
    ]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ResourceSpecError, match="no such resource spec file; working directory"):
        load_resource_spec(tmp_path / "missing.yml")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "spec.toml").touch()
    with pytest.raises(ResourceSpecError, match=r"ends in \.yml, \.yaml, \.pb or \.json"):
        load_resource_spec(tmp_path / "spec.toml")


def test_local_workers_are_loopback_nodes_with_the_first_as_chief():
    spec = local_resource_spec(3, cpus_per_worker=[2, 1, 1])
    assert spec.replica_devices == ("127.0.0.1:CPU:0", "127.0.0.1:CPU:1", "127.0.0.2:CPU:0", "127.0.0.3:CPU:0")
    assert spec.chief.address == "127.0.0.1"
    assert spec.is_local


@pytest.mark.parametrize(("workers", "cpus"), [(0, 1), (255, 1), (2, 0), (2, 1025), (2, [1]), (2, [1, 0])])
def test_local_workers_out_of_range_are_refused(workers, cpus):
    with pytest.raises(ResourceSpecError):
        local_resource_spec(workers, cpus)


def test_this_machine_replicates_on_its_gpus_else_on_one_cpu():
    assert this_machine(num_gpus=2).replica_devices == ("127.0.0.1:GPU:0", "127.0.0.1:GPU:1")
    assert this_machine(num_gpus=0).replica_devices == ("127.0.0.1:CPU:0",)


NODES = (NodeSpec("10.0.0.1", chief=True), NodeSpec("10.0.0.2", cpus=(0, 1)))
LAB = (("lab", SSHConfig("ada", shared_envs=(("TOKEN", "hush"),))),)


@pytest.mark.parametrize(
    ("other", "lines"),
    [
        (ResourceSpec((*NODES, NodeSpec("10.0.0.3")), LAB), ("number of nodes: 2", "number of nodes: 3")),
        (ResourceSpec((NODES[0], NodeSpec("10.0.0.2")), LAB), ("nodes[1].cpus: (0, 1)", "nodes[1].cpus: (0,)")),
        (ResourceSpec(NODES, (("lab", SSHConfig("bob")),)), ("ssh.lab.username: 'ada'", "ssh.lab.username: 'bob'")),
    ],
)
def test_two_specs_differ_first_where_a_person_would_look(other, lines):
    spec = ResourceSpec(NODES, LAB)
    assert first_difference(spec_lines(spec), spec_lines(other)) == lines
    assert spec_lines(spec) == spec_lines(ResourceSpec(NODES, LAB))


def test_what_is_compared_has_no_value_of_the_environment():
    one, other = (SSHConfig(shared_envs=(("TOKEN", value),)) for value in ("hush", "hash"))
    lines = [spec_lines(ResourceSpec(NODES, (("lab", each),))) for each in (one, other)]
    assert lines[0] != lines[1]
    assert "hush" not in lines[0]


@pytest.mark.parametrize(("before", "behind"), [(0, 0), (0, 300), (10, 3), (100, 0), (100, 100)])
def test_of_long_values_it_is_shown_where_they_differ_on_the_one_line_of_a_cause(before, behind):
    paths = ["/" + "a" * before + each + "b" * behind for each in "xy"]
    one, other = (spec_lines(ResourceSpec(NODES, (("lab", SSHConfig(python_venv=path)),))) for path in paths)
    shown = first_difference(one, other)
    assert "x" in shown[0] and "y" in shown[1]
    error = ClusterError(
        f"another resource spec than before: {shown[0]}, where it was {shown[1]}. A process " + "x " * 200
    )
    assert f"{shown[0]}, where it was {shown[1]}" in one_line(error)
