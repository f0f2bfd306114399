"""The workloads' models in PyTorch, trained by its DistributedDataParallel: a peer, where `torch` is installed.

No extra of ours asks for it, as it brings gigabytes: `.venv/bin/python -m pip install torch`. Each model is built of
PyTorch's own layers and has the weights that the workload's TensorFlow model begins with. Tables have sparse gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count, takewhile
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import RATE, WORKLOADS, Workload

Weights: TypeAlias = Mapping[str, npt.NDArray[np.float32]]
"""A workload's first weights, by the names of its variables."""


def _tensor(value: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(value))


def _filled(layer: nn.Module, weight: npt.NDArray[Any], bias: npt.NDArray[Any] | None = None) -> Any:
    with torch.no_grad():
        layer.weight.copy_(_tensor(weight))
        if bias is not None:
            layer.bias.copy_(_tensor(bias))
    return layer


def _linear(weights: Weights, kernel: str, bias: str = "") -> nn.Linear:
    value = weights[kernel].T
    return _filled(nn.Linear(*value.shape[::-1], bias=bool(bias)), value, weights[bias] if bias else None)


def _table(weights: Weights, name: str) -> nn.Embedding:
    return _filled(nn.Embedding(*weights[name].shape, sparse=True), weights[name])


def _dense_layers(weights: Weights, kernel: str, bias: str) -> nn.Sequential:
    """Those of names that end in a number; rectified between them, not after the last one."""
    layers: list[nn.Module] = []
    for number in takewhile(lambda one: f"{kernel}_{one}" in weights, count()):
        layers += [nn.ReLU(), _linear(weights, f"{kernel}_{number}", f"{bias}_{number}")]
    return nn.Sequential(*layers[1:])


class Mlp(nn.Module):
    """Of the workload `mlp`."""

    def __init__(self, weights: Weights):
        super().__init__()
        self.layers = _dense_layers(weights, "kernel", "bias")

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        return functional.cross_entropy(self.layers(images), labels)


class Emb(nn.Module):
    """Of the workload `emb`."""

    def __init__(self, weights: Weights):
        super().__init__()
        self.table = _table(weights, "table")
        self.hidden, self.top = _linear(weights, "hidden", "hidden_bias"), _linear(weights, "top", "top_bias")

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        pooled = self.table(ids).mean(1)
        return functional.cross_entropy(self.top(torch.relu(self.hidden(pooled))), labels)


class Cnn(nn.Module):
    """Of the workload `cnn`; rows of channels stand side by side, as in TensorFlow."""

    def __init__(self, weights: Weights):
        super().__init__()
        filters = [weights[f"filter_{number}"].transpose(3, 2, 0, 1) for number in range(3)]
        self.filters = nn.ModuleList(
            _filled(nn.Conv2d(each.shape[1], each.shape[0], 3, stride=2), each, weights[f"bias_{number}"])
            for number, each in enumerate(filters)
        ).to(memory_format=torch.channels_last)
        self.top = _linear(weights, "top", "top_bias")

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        value = images.permute(0, 3, 1, 2)
        for convolution in self.filters:
            value = torch.relu(convolution(functional.pad(value, (0, 1, 0, 1))))
        return functional.cross_entropy(self.top(value.permute(0, 2, 3, 1).flatten(1)), labels)


class Tlm(nn.Module):
    """Of the workload `tlm`."""

    def __init__(self, weights: Weights):
        super().__init__()
        self.table = _table(weights, "table")
        self.positions = nn.Parameter(_tensor(weights["positions"]))
        names = sorted({name.partition("/")[0] for name in weights if name.startswith("layer_")})
        self.layers = nn.ModuleList(_TransformerLayer(weights, name) for name in names)
        self.norm, self.top = _layer_norm(weights, "norm"), _linear(weights, "top")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        value = self.table(tokens[:, :-1]) + self.positions
        for layer in self.layers:
            value = layer(value)
        return functional.cross_entropy(self.top(self.norm(value)).flatten(0, 1), tokens[:, 1:].flatten().long())


class _TransformerLayer(nn.Module):
    _heads = 4

    def __init__(self, weights: Weights, name: str):
        super().__init__()
        self.norms = nn.ModuleList(_layer_norm(weights, f"{name}/norm_{number}") for number in (1, 2))
        self.mixed, self.joined = _linear(weights, f"{name}/qkv"), _linear(weights, f"{name}/out")
        self.wide, self.narrow = _linear(weights, f"{name}/wide"), _linear(weights, f"{name}/narrow")

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        first, second = self.norms
        size, tokens, width = value.shape
        parts = self.mixed(first(value)).view(size, tokens, 3, self._heads, width // self._heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        value = value + self.joined(heads.transpose(1, 2).reshape(size, tokens, width))
        return value + self.narrow(torch.relu(self.wide(second(value))))


def _layer_norm(weights: Weights, name: str) -> nn.LayerNorm:
    scale = weights[f"{name}/scale"]
    return _filled(nn.LayerNorm(scale.shape, eps=1e-5), scale, weights[f"{name}/offset"])


class Dlrm(nn.Module):
    """Of the workload `dlrm`."""

    def __init__(self, weights: Weights):
        super().__init__()
        names = [name for name in weights if name.startswith("table_")]
        self.tables = nn.ModuleList(_table(weights, name) for name in names)
        self.bottom, self.top = (_dense_layers(weights, f"{name}/kernel", f"{name}/bias") for name in ("bottom", "top"))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        first = torch.relu(self.bottom(numbers))
        rows = [
            self.tables[feature % len(self.tables)](ids[:, feature].contiguous()) for feature in range(ids.shape[1])
        ]
        vectors = torch.stack([first, *rows], 1)
        places = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, places[0], places[1]]
        logits = self.top(torch.cat([products, first], 1)).flatten()
        return functional.binary_cross_entropy_with_logits(logits, labels)


MODELS: Mapping[str, Callable[[Weights], nn.Module]] = {
    "mlp": Mlp,
    "emb": Emb,
    "cnn": Cnn,
    "tlm": Tlm,
    "dlrm": Dlrm,
}
"""By workload; not `wide`, whose losses under DistributedDataParallel differ from run to run."""


def distributed_step(
    workload: Workload,
    parts: Sequence[Sequence[npt.NDArray[Any]]],
    rank: int,
    addresses: Sequence[str],
    port: int,
    threads: tuple[int, int],
) -> Callable[[int], torch.Tensor]:
    """Trains on this worker's part of the batch of that number; its loss of it.

    Args:
        workload: one that MODELS has; it says the first weights.
        parts: of the batches, this worker's.
        rank: this worker's.
        addresses: of all workers, one of each; the first one listens at `port`.
        port: free there.
        threads: of one op, and of several.
    """
    torch.set_num_threads(threads[0])
    torch.set_num_interop_threads(threads[1])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{addresses[0]}:{port}",
        rank=rank,
        world_size=len(addresses),
        timeout=timedelta(days=1),  # The time for which it is stopped counts.
    )
    first = {variable.name.partition(":")[0]: variable.numpy() for variable in workload.model().variables}
    (name,) = (name for name, one in WORKLOADS.items() if one is workload)
    model = DistributedDataParallel(MODELS[name](first))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    tensors = [[_of_ids(_tensor(array)) for array in part] for part in parts]

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*tensors[number % len(tensors)])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _of_ids(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.long() if tensor.dtype == torch.int32 else tensor
