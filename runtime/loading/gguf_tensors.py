"""Finds the tensors of GGUF files by the names that they have in transformers.

Conversion to GGUF renames tensors, stacks experts, reorders heads and changes a few tensors. Here
it is undone. The package gguf has the names of tensors in each architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError
from ..kernels.ops.parameter import HeadRows, Source
from ..kernels.weights import GroupedWeight
from ..kernels.weights.gguf import GGUFType, PlainType
from .checkpoint import reading
from .gguf_file import GGUFFile, GGUFTensor, gguf_package

_PERMUTED = frozenset({"llama", "granite", "smollm3", "granitehybrid"})
"""Architectures whose rows of queries and keys are reordered, so that neighbours are rotated."""
_TILED = frozenset({"qwen35", "qwen35moe"})
"""Architectures with the first head of values of each head of keys, then the second of each, and so
on; transformers has all of the first head of keys first."""
_OFFSET_NORMS = frozenset({"gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next"})
"""Architectures whose norms multiply by one plus their weight, and are stored as the sum."""
_QUERIES_KEYS = re.compile(r".*self_attn\.[qk]_proj\.(weight|bias)")
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})(\..*)")
_RENAMED = (
    (r"\.dt_bias$", ".dt_proj.bias"),
    (r"\.expert_bias$", ".expert_bias.bias"),
    (r"_bias$", ".bias"),
    (r"^model\.(.*feed_forward\.experts\.w\d)", r"\1"),
    (r"^backbone\.(.*)mixer\.experts", r"model.\1mlp.experts"),
)
"""Parts of names in transformers, and in the package gguf."""
_COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "conv.conv.weight": lambda kernel: kernel.unsqueeze(1),  # `[features, 1, taps]`
    "conv1d.weight": lambda kernel: kernel.unsqueeze(1),
    "shared_expert_gate.weight": lambda gate: gate.reshape(1, -1),  # a vector in some files
    ".A_log": lambda decay: (-decay.flatten()).log(),
    "mixer.D": lambda skip: skip.flatten(),
    "mamba.D": lambda skip: skip.flatten(),
    "mixer.norm.weight": lambda weight: weight.flatten(),  # of each group of heads
    "mamba.norm.weight": lambda weight: weight.flatten(),
}
"""How tensors that conversion changes are computed from its result, by the end of their names."""
_JOINED: dict[str, tuple[str, Sequence[str], Callable[[Tensor, Tensor], Tensor]]] = {
    # Biases of gpt-oss alternate: `[experts, 2F]`.
    "experts.gate_up_proj.bias": (
        *("gate_up", ("gate", "up")),
        lambda gate, up: torch.stack((gate, up), dim=-1).flatten(1),
    ),
    # The projection of latents to keys, `[heads, rank, keys]`, and to values of each head.
    "kv_b_proj.weight": (
        *("kv_b", ("k_b", "v_b")),
        lambda keys, values: torch.cat((keys.mT, values), dim=1).flatten(0, 1),
    ),
}
"""Tensors that are computed from two: the part of the name that differs, and what it is in each."""


@dataclass(frozen=True)
class GGUFStored:
    """A tensor of transformers as the file stores it."""

    tensors: tuple[GGUFTensor, ...]
    """Several of one type have its rows one after the other."""
    shape: tuple[int, ...]
    """In transformers."""
    expert: int | None = None
    """Its index in a stack of experts."""
    rows: Tensor | None = None
    """The row of the file for each row, int64; None: the same."""
    inputs: Tensor | None = None
    """The column of the file for each column of a matrix, int64; None: the same."""
    compute: Callable[..., Tensor] | None = None
    """Computes it from the decoded tensors; None: it has their numbers."""

    @property
    def type(self) -> GGUFType | PlainType:
        """Of the first tensor."""
        return self.tensors[0].type

    @property
    def scale(self) -> float:
        """Factor of a quantised tensor."""
        scales = self.tensors[0].scales
        return 1.0 if scales is None else float(scales[(self.expert or 0) % len(scales)])

    def codes(self, source: Source, *, meta: bool) -> GroupedWeight:
        """Return the rows of a source of a quantised tensor, see `CheckpointReader.stored`."""
        assert isinstance(self.type, GGUFType)
        if meta:
            return self.type.described(source, self.scale, self.inputs)
        with self._reading():
            return self.type.read(self._data(), source.selection, self.scale, self.inputs)

    def numbers(self) -> Tensor:
        """Return the whole tensor. Raises `CheckpointError` if it cannot be decoded."""
        with self._reading():
            if self.compute is not None:
                parts = (GGUFStored((tensor,), tensor.shape).numbers() for tensor in self.tensors)
                return self.compute(*(part.float() for part in parts))
            if isinstance(self.type, GGUFType):
                return self.type.read(self._data(), None, self.scale, self.inputs).decode()
            data = self._data()
            return data if self.inputs is None else data[:, self.inputs]

    def _data(self) -> Tensor:
        """Return the numbers of a plain tensor, the blocks of another one; a view if possible."""
        data = self.tensors[0].data
        if len(self.tensors) > 1:
            data = torch.cat([tensor.data for tensor in self.tensors], dim=len(self.shape) - 2)
        if self.expert is not None:
            data = data[self.expert]
        return data if self.rows is None else data[self.rows]

    def _reading(self) -> AbstractContextManager[None]:
        """Raise `CheckpointError` for contents that cannot be decoded."""
        return reading(self.tensors[0].file, self.tensors[0].name)


class GGUFTensors:
    """The tensors of a file by the names that they have in transformers."""

    def __init__(self, file: GGUFFile, num_layers: int) -> None:
        """Read a file of an architecture that the package gguf has."""
        self._file = file
        self._architecture = file.require("general.architecture", str)
        package = gguf_package()
        numbers = {name: number for number, name in package.MODEL_ARCH_NAMES.items()}
        self._names = package.get_tensor_name_map(numbers[self._architecture], num_layers)

    def find(self, name: str) -> GGUFStored | None:
        """Return how the file stores a tensor; None if it does not.

        Raises:
            CheckpointError: shapes do not fit each other or the metadata.
        """
        expert, own = None, name
        if (match := _OF_EXPERT.fullmatch(own)) is not None:
            expert, own = int(match[2]), match[1] + match[3]
        for ours, theirs in _RENAMED:
            own = re.sub(ours, theirs, own)
        if expert is None and ".experts." in own and not own.endswith(".bias"):
            return None  # a stack, of which each expert is found by itself
        tensor = self._named(own)
        if tensor is None:
            return self._of_several(own)
        if expert is not None:
            experts = self._size("expert_count")
            if len(tensor.shape) != 3 or tensor.shape[0] != experts:
                raise CheckpointError(
                    f"{tensor.file}: {tensor.name} is {bounded_repr(list(tensor.shape), 80)}, which"
                    f" must be a stack of expert_count = {experts} matrices"
                )
            return GGUFStored((tensor,), tensor.shape[1:], expert)
        if self._architecture in _TILED and "linear_attn." in own:
            return self._of_values(own, tensor)
        offset = self._architecture in _OFFSET_NORMS and "linear_attn." not in own
        if offset and own.endswith("norm.weight"):
            return self._computed((tensor,), lambda weight: weight - 1.0)
        for end, compute in _COMPUTED.items():
            if own.endswith(end):
                return self._computed((tensor,), compute)
        rows = None
        if self._architecture in _PERMUTED and _QUERIES_KEYS.fullmatch(own):
            dim = self._size("attention.key_length")
            dim = dim or self._size("embedding_length") // max(
                1, self._size("attention.head_count")
            )
            heads = HeadRows(0, tensor.shape[0] // dim, dim, dim, interleaved=True)
            rows = heads.read(torch.arange(tensor.shape[0]))
        return GGUFStored((tensor,), tensor.shape, rows=rows)

    def _of_several(self, own: str) -> GGUFStored | None:
        """Return a tensor that the file has in parts."""
        for end, (part, by, compute) in _JOINED.items():
            if own.endswith(end):
                found = self._parts(own, part, by)
                return self._computed(found, compute) if found else None
        if own.endswith("in_proj_qkvz.weight"):
            found = self._parts(own, "qkvz", ("qkv", "z"))
            return self._stacked(found, self._rows_by_key_head(found)) if found else None
        if own.endswith("block_sparse_moe.input_linear.weight"):
            mlp = own.replace("block_sparse_moe.input_linear", "mlp.experts.gate_proj")
            return self._stacked(self._parts(mlp, "gate", ("gate", "up")))
        if own.endswith("shared_mlp.input_linear.weight"):  # without experts it is the only MLP
            shared = own.replace("shared_mlp.input_linear", "mlp.shared_expert.gate_proj")
            found = self._parts(shared, "gate", ("gate", "up"))
            dense = shared.replace("shared_expert.", "")
            return self._stacked(found or self._parts(dense, "gate", ("gate", "up")))
        if own.endswith("shared_mlp.output_linear.weight"):
            tensor = self._named(own.replace("shared_mlp.output_linear", "mlp.down_proj"))
            return None if tensor is None else GGUFStored((tensor,), tensor.shape)
        return None

    def _of_values(self, own: str, tensor: GGUFTensor) -> GGUFStored:
        """Return a tensor of a gated delta rule, whose heads of values are in order again."""
        keys, values = self._size("ssm.group_count"), self._size("ssm.time_step_rank")
        columns = own.endswith("out_proj.weight")
        one_each = own.endswith(("A_log", "dt_proj.bias", "in_proj_a.weight", "in_proj_b.weight"))
        dim = 1 if one_each else self._size("ssm.inner_size") // max(1, values)
        size = tensor.shape[-1 if columns else 0]
        before = size - values * dim  # queries and keys
        if own.endswith("linear_attn.norm.weight"):  # shared by all heads
            return GGUFStored((tensor,), tensor.shape)
        if not 0 < keys <= values or values % keys or before < 0 or not dim:
            raise _unfit((tensor,))
        heads = torch.arange(values).view(-1, keys).T.reshape(-1, 1)
        rows = (before + dim * heads + torch.arange(dim)).flatten()
        order = torch.cat((torch.arange(before), rows))
        if columns:
            return GGUFStored((tensor,), tensor.shape, inputs=order)
        for end, compute in _COMPUTED.items():
            if own.endswith(end):
                return self._computed((tensor,), compute, order)
        return GGUFStored((tensor,), tensor.shape, rows=order)

    def _rows_by_key_head(self, found: Sequence[GGUFTensor]) -> Tensor:
        """Return the order of rows of Qwen3-Next: of each head of keys, its query, its key, its
        values and their gates. The file has all queries, then all keys, values and gates."""
        keys, dim = self._size("ssm.group_count"), self._size("ssm.state_size")
        inner = self._size("ssm.inner_size")
        rows = sum(tensor.shape[0] for tensor in found)
        if not keys or inner % keys or rows != 2 * (keys * dim + inner):
            raise _unfit(found)
        kinds = torch.arange(rows).split((keys * dim,) * 2 + (inner,) * 2)
        return torch.cat([kind.view(keys, -1) for kind in kinds], dim=1).flatten()

    def _size(self, key: str) -> int:
        """Return a number of the metadata; 0 if there is none."""
        return self._file.get(f"{self._architecture}.{key}", int) or 0

    def _named(self, name: str) -> GGUFTensor | None:
        """Return the tensor of the file for a name."""
        found = self._names.get_name(name, (".weight", ".bias"))
        # Some parameters, such as sinks, have this suffix only in files.
        return self._file.tensors.get(found) or self._file.tensors.get(f"{found}.weight")

    def _parts(self, name: str, part: str, by: Sequence[str]) -> tuple[GGUFTensor, ...]:
        """Return the tensors whose names have each of `by` in place of `part`; none if one is
        missing."""
        tensors = [self._named(name.replace(part, other)) for other in by]
        found = tuple(tensor for tensor in tensors if tensor is not None)
        return found if len(found) == len(tensors) else ()

    def _stacked(
        self, found: tuple[GGUFTensor, ...], rows: Tensor | None = None
    ) -> GGUFStored | None:
        """Return a tensor with the rows of others in an order; None without these."""
        if not found:
            return None

        stored = self._computed(found, lambda *parts: torch.cat(parts, dim=-2), rows)
        if len({tensor.type for tensor in found}) > 1 or any(t.scales is not None for t in found):
            return stored
        return GGUFStored(found, stored.shape, rows=rows)

    def _computed(
        self,
        found: tuple[GGUFTensor, ...],
        compute: Callable[..., Tensor],
        rows: Tensor | None = None,
    ) -> GGUFStored:
        """Return a tensor computed from others, with its rows in an order."""

        def computed(*parts: Tensor) -> Tensor:
            return compute(*parts) if rows is None else compute(*parts)[rows]

        zero = torch.zeros(1, dtype=torch.uint8)  # on `meta` torch would import its compiler
        try:
            shape = computed(*(zero.expand(tensor.shape) for tensor in found)).shape
        except (RuntimeError, IndexError) as error:
            raise _unfit(found) from error
        return GGUFStored(found, tuple(shape), compute=computed)


def _unfit(found: Sequence[GGUFTensor]) -> CheckpointError:
    shapes = ", ".join(f"{t.name} {bounded_repr(list(t.shape), 80)}" for t in found)
    return CheckpointError(f"{found[0].file}: the shapes of {shapes} do not fit")
