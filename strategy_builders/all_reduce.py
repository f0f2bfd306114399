"""AllReduce: every replica holds every variable, and gradients are summed by collectives."""

from dataclasses import dataclass

from autodist_py.proto.checks import require_flag, require_member, require_not_negative, require_seconds
from autodist_py.proto.compressors import Compressor, compressor_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import ALL_REDUCE_SPECS, AllReduceSynchronizer, require_local
from autodist_py.proto.text import shown


@dataclass(frozen=True, slots=True)
class AllReduce:
    """One AllReduce synchronizer per trainable variable, `chunk_size` successive variables to a group.

    Attributes:
        chunk_size: variables whose gradients are reduced together. More of them: fewer, larger messages; fewer: the
            reduction starts earlier and overlaps more of back-propagation.
        all_reduce_spec: NCCL, RING or HOROVOD, which must be installed on every worker (`make horovod`) and sums dense
            gradients over workers; or AUTO: NCCL if all replicas are on GPUs, HOROVOD if it is installed and a step
            reduces many bytes over fast links, else RING (docs/performance.md, "Engines"). What is gathered travels by
            rings whatever it says: sparse gradients, and what some compressors make of dense ones.
        compressor: how gradients are coded on the wire: a compressor, or its text, such as "HorovodCompressor", half
            precision, or "HorovodCompressor(dtype='bfloat16')"; all but NoneCompressor lose precision.
        bytes_per_pack: how large the buffers are in which the gradients of a group are reduced, as back-propagation
            finishes them; a larger gradient is reduced in pieces, by HOROVOD whole. 0: a size that follows from
            the slowest link of the resource spec and the model's size (docs/performance.md).
        timeout_seconds: how long a step waits for a worker that has not begun it, or that is not heard of in the middle
            of it: then 2 s at least, and no longer than AUTODIST_HEARTBEAT_TIMEOUT, after which a silent worker is lost
            anyway. Within two more seconds every worker raises, and names the worker and the variables of the group for
            which it was waited (a step that waits in HOROVOD may be ended instead, with that as the last line, unless
            AUTODIST_EXIT_GRACE is longer than the heartbeat's timeout). 0: as long as the worker's heartbeats come. It
            must be longer than what one worker does alone between two steps, such as the chief's checkpoint. Workers
            that all reach the chief, but not each other, and one that hangs inside the step in which the others wait,
            are not noticed.
        sparse_as_dense: whether sparse gradients travel as dense ones, and then with any compressor. None: where that
            is fewer bytes, by the shape of the table and the size of the first batch (docs/performance.md), and the
            update adds rows up, as plain SGD's does. True is refused for a table whose update does more.
        local: how a worker's replicas are added up before their sum leaves it, with AUTO and HOROVOD: "one_device"
            copies all gradients to the first replica's device; "hierarchical" adds them up along a tree of the devices,
            so that none gets more than one at a time; "nccl" is NCCL's all-reduce, between GPUs.
        factors: whether the factors of a gradient are gathered, and multiplied by each worker, where it is a product of
            matrices whose rows are of examples, as a dense layer's is (Xie et al., UAI 2016; docs/performance.md). It
            is the same sum. None: where that takes less time, by the first batch, the shapes and the slowest link. With
            several replicas, True is refused where no gradient is such a product, and with a compressor, which codes
            the gradient itself.

    Raises:
        StrategyError: a parameter is out of its range.
    """

    chunk_size: int = 128
    all_reduce_spec: str = "AUTO"
    compressor: Compressor | str = "NoneCompressor"
    bytes_per_pack: int = 0
    timeout_seconds: float = 0.0
    sparse_as_dense: bool | None = None
    local: str = "one_device"
    factors: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.chunk_size, bool) or not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise StrategyError(f"chunk_size of AllReduce must be an integer >= 1; got {shown(self.chunk_size)}")
        require_member(self.all_reduce_spec, ALL_REDUCE_SPECS, "all_reduce_spec of AllReduce", error=StrategyError)
        object.__setattr__(self, "compressor", compressor_of(self.compressor, "compressor of AllReduce"))
        require_not_negative(self.bytes_per_pack, "bytes_per_pack of AllReduce", error=StrategyError)
        require_seconds(self.timeout_seconds, "timeout_seconds of AllReduce", error=StrategyError)
        require_flag(self.sparse_as_dense, "sparse_as_dense of AllReduce", error=StrategyError)
        require_local(self.local, self.all_reduce_spec, "AllReduce")
        require_flag(self.factors, "factors of AllReduce", error=StrategyError)

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """The group of a variable is its index among the trainable ones // `chunk_size`."""
        return Strategy(
            node_config=tuple(
                VariableStrategy(variable.name, self.synchronizer(index))
                for index, variable in enumerate(item.trainable_variables)
            ),
            replicas=resources.replica_devices,
        )

    def synchronizer(self, index: int) -> AllReduceSynchronizer:
        """That of the variable, or of the part of one, at that index among all."""
        return AllReduceSynchronizer(
            spec=self.all_reduce_spec,
            compressor=self.compressor,
            group=index // self.chunk_size,
            bytes_per_pack=self.bytes_per_pack,
            timeout_seconds=self.timeout_seconds,
            sparse_as_dense=self.sparse_as_dense,
            local=self.local,
            factors=self.factors,
        )
