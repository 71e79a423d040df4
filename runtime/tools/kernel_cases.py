"""The kernels of a decode step, one by one, each over tensors of a model's shapes.

For checking them against their plain versions (`verify_kernels.py`), and for timing them: then
there are several copies of weights and cache, so that each call reads what no cache of the device
holds any more. The kernels are those that `kernels/triton/fusion.py` finds in the plan of the
model. Each reads what the one before it wrote, as in a step. Needs triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..kernels import AttentionForm, LayerPlace
from ..kernels.ops.layer_operations import Linear
from ..kernels.triton.combine_output import product_combines
from ..kernels.triton.fusion import Attention, Fused, GateUp, NormLinear, ResidualLinear, fuse
from ..kernels.triton.kernel_calls import num_multiprocessors
from ..kernels.triton.linear import GpuLinear, Pending
from ..kernels.triton.operation_check import WRITES, OutputCopies, written_tensors
from ..kernels.triton.operations import Operations
from ..kernels.triton.rotated_heads import HeadRotation
from ..kernels.triton.split_attention import Partials, choose_tile, new_counters, new_partials
from ..kernels.triton.splits import choose_splits
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..resolved_config import ResolvedConfig
from .random_tensors import RandomCache, RandomTensors

__all__ = ["KernelCase", "decode_cases"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of an operation."""

_PLAIN = Operations.reference()


class KernelCase:
    """One kernel launch, with its tensors and its plain version."""

    def __init__(
        self,
        name: str,
        operation: str,
        operations: Operations,
        arguments: Callable[[int], _Arguments],
        newest: Callable[[Tensor], Tensor],
        library: Callable[[int], object] | None = None,
    ) -> None:
        """Prepare the launch of an operation.

        Args:
            name: of the kernel, as in `step_costs.py`.
            operation: a field of `Operations`.
            operations: the version that runs.
            arguments: returns its arguments over copy number `i` of what it reads.
            newest: reads from the arena what the operation wrote to it.
            library: the cuBLAS product of the same shape, without norm, activation and residual.
        """
        self.name, self.library = name, library
        self._kernel, self._plain = getattr(operations, operation), getattr(_PLAIN, operation)
        self._writes, self._signature = WRITES[operation], inspect.signature(self._plain)
        self._arguments, self._newest = arguments, newest
        self._returned: Sequence[Tensor] = ()

    def run(self, i: int) -> None:
        """Launch it over copy number `i`, modulo the copies there are, of what it reads."""
        self._returned = ()  # its memory can be reused
        arguments, keywords = self._arguments(i)
        self._returned = self._kernel(*arguments, **keywords) or ()

    def results(self) -> list[Tensor]:
        """Return the results of the last call over copy 0."""
        return self._results_of(self._given(), self._returned)

    def reference(self) -> list[Tensor]:
        """Return the same results in plain PyTorch, from the current inputs, unchanged."""
        given = OutputCopies(self._given(), self._writes).given
        return self._results_of(given, self._plain(*given.args, **given.kwargs) or ())

    def outputs(self) -> list[Tensor]:
        """Return the tensors that the last call wrote, and no kernel reads before that."""
        return [*self._returned, *(tensor for tensor, read in self._written() if not read)]

    def updates(self) -> list[Tensor]:
        """Return the results in tensors that this kernel or an earlier one of the step reads."""
        return [tensor for tensor, read in self._written() if read]

    def _given(self) -> inspect.BoundArguments:
        arguments, keywords = self._arguments(0)
        return self._signature.bind(*arguments, **keywords)

    def _written(self) -> Iterator[tuple[Tensor, bool]]:
        """Each output, and whether it was read before: hidden states, and what is added to them."""
        arguments = self._given().arguments
        for parameter in self._writes.outputs:
            match arguments.get(parameter):
                case Tensor() as out:
                    yield out, "residual_TN" in arguments
                case Pending() as pending:
                    yield pending.out, False
                case Partials() as partials:
                    yield from ((tensor, False) for tensor in partials)

    def _results_of(
        self, given: inspect.BoundArguments, returned: Sequence[Tensor]
    ) -> list[Tensor]:
        """What is written and, of the head, the logits and that of the best chunk's token."""
        written = written_tensors(given, self._writes, self._newest)
        found = [tensor for parameter, tensor in written if parameter != "counters"]
        if returned:
            logits_TV, maxima_TC, ids_TC = returned
            id_T1 = ids_TC.gather(1, maxima_TC.argmax(1, keepdim=True)).long()
            found += [logits_TV, logits_TV.gather(1, id_T1)]
        return found


def decode_cases(
    model: ModelConfig,
    config: ResolvedConfig,
    device: torch.device,
    *,
    rows: int,
    context: int,
    copies: int = 1,
    operations: Operations | None = None,
) -> list[KernelCase]:
    """Return the kernels of the first layer that decodes, and the projection to the vocabulary.

    Args:
        model: one that `kernel_obstacle` has nothing against.
        config: dtype, storage of weights and cache, block size.
        device: where the tensors are.
        rows: that decode, at most `linear.ROW_CLASSES[-1]`.
        context: tokens of each row, the newest included.
        copies: of weights and cache.
        operations: that run; None: the Triton kernels.
    """
    cases = _StepCases(
        model, config, device, rows, context, copies, operations or Operations.native()
    )
    return list(cases.make())


class _StepCases:
    """The kernels of a step over tensors that they share."""

    def __init__(
        self,
        model: ModelConfig,
        config: ResolvedConfig,
        device: torch.device,
        rows: int,
        context: int,
        copies: int,
        operations: Operations,
    ) -> None:
        self._plan = plan = model_plan(model)
        self._layer = fuse(plan.layers[0])
        self._config, self._rows, self._context = config, rows, context
        self._copies, self._operations = copies, operations
        self._random = random = RandomTensors(config.dtype, config.weights, device)
        self._cache = RandomCache(model, config, device, rows=rows, context=context, layers=copies)
        self._x, self._delta, x_next = (self._activations(plan.hidden_size) for _ in range(3))
        norm = plan.norm
        self._norms = [
            random.norm(plan.hidden_size, norm.eps, offset=norm.offset) for _ in range(copies)
        ]
        self._linears = {
            fused: [self._linear(fused.linear) for _ in range(copies)]
            for fused in self._layer
            if isinstance(fused, NormLinear | GateUp | ResidualLinear)
        }
        self._pending: Pending | None = None
        # In families with output norms, the next kernel adds the residual.
        if any(isinstance(fused, ResidualLinear) and fused.norm for fused in self._layer):
            self._pending = Pending(self._delta, self._norms[0], x_next)
        self._value = self._x
        """What the last kernel wrote, or would have written without leaving splits."""
        self._partials: Partials | None = None
        """Splits that attention left to the next kernel."""

    def make(self) -> Iterator[KernelCase]:
        """Yield the cases, each over what the one before it wrote."""
        for fused, after in pairwise([*self._layer, None]):
            match fused:
                case NormLinear() | GateUp():
                    yield self._normed_product(fused)
                case Attention():
                    yield self._attention(fused, after)
                case ResidualLinear():
                    yield self._added_product(fused)
                case _:
                    raise ValueError(f"{fused.name} is no kernel of a decode step")
        yield self._head()

    def _normed_product(self, fused: NormLinear | GateUp) -> KernelCase:
        x, linears, out = self._x, self._linears[fused], self._activations(fused.features)
        gelu = {"gelu": fused.gelu} if isinstance(fused, GateUp) else {}
        self._value = out
        return self._case(
            (fused.name, fused.name),
            lambda i: (
                (x, self._norms[i % self._copies], linears[i % self._copies], out),
                {**gelu, "pending": self._pending},
            ),
            self._product(x, linears),
        )

    def _attention(self, fused: Attention, after: Fused | None) -> KernelCase:
        """Attention, which leaves its splits to the output projection if that is better."""
        assert isinstance(after, ResidualLinear)
        attend, config, cache, copies = fused.attend, self._config, self._cache, self._copies
        arena, size, device = cache.arena, attend.head_dim, self._x.device
        tile = choose_tile(attend.heads // attend.kv_heads, size, size, arena.element_size())
        splits = choose_splits(
            self._rows,
            attend.kv_heads,
            self._context,
            num_multiprocessors(device),
            tile.positions,
        )
        partials = new_partials(self._rows, attend.heads, splits, size, device)
        partials.acc.normal_()
        partials.m.normal_()
        partials.l.uniform_(0.5, 1.5)
        counters, rotation = new_counters(device), self._rotation(fused)
        form = AttentionForm(
            attend.scale, attend.window, attend.softcap, config.storage, attend.value_dim
        )
        qkv_TN, attended_TK = self._value, self._activations(attend.features)
        output = self._linears[after]
        combining = product_combines(partials.acc, output[0], config.dtype)
        self._value, self._partials = attended_TK, partials if combining else None
        return self._case(
            (fused.name, "decode_attention"),
            lambda i: (
                (qkv_TN, arena, LayerPlace(0, i % copies), rotation, cache.batch, form, partials),
                {
                    "attended_TN": None if combining else attended_TK,
                    "counters": counters,
                    "next_weight": output[i % copies].weight,
                },
            ),
        )

    def _added_product(self, fused: ResidualLinear) -> KernelCase:
        linears, partials, value = self._linears[fused], self._partials, self._value
        residual, out = (self._x, self._x) if fused.norm is None else (None, self._delta)
        inputs = (value,) if partials is None else tuple(partials)
        self._partials = None
        return self._case(
            (fused.name, "residual_linear" if partials is None else "combine_output"),
            lambda i: ((*inputs, linears[i % self._copies], residual, out), {}),
            self._product(value, linears),
        )

    def _head(self) -> KernelCase:
        linears = [self._linear(self._plan.head) for _ in range(min(self._copies, 2))]
        norms, softcap = self._norms, self._plan.logit_softcap
        return self._case(
            ("head", "head"),
            lambda i: (
                (self._x, norms[i % self._copies], linears[i % len(linears)], softcap),
                {"pending": self._pending},
            ),
            self._product(self._x, linears),
        )

    def _case(
        self,
        names: tuple[str, str],
        arguments: Callable[[int], _Arguments],
        library: Callable[[int], object] | None = None,
    ) -> KernelCase:
        return KernelCase(*names, self._operations, arguments, self._cache.newest, library)

    def _product(
        self, x_TK: Tensor, linears: Sequence[GpuLinear]
    ) -> Callable[[int], object] | None:
        """The library's product of `x_TK` and the layers; None for weights of 8 bits."""
        if self._config.weights != "model":
            return None
        return lambda i: torch.mm(x_TK, linears[i % len(linears)].weight.T)

    def _activations(self, features: int) -> Tensor:
        return self._random.normal(self._rows, features)

    def _linear(self, linear: Linear) -> GpuLinear:
        bias = linear.bias is not None
        return self._random.linear(linear.out_features, linear.in_features, bias=bias)

    def _rotation(self, fused: Attention) -> HeadRotation:
        """Norms of queries and keys, if the model has them, and random angles."""
        size, random, norm = self._plan.rope_dim, self._random, fused.qk_norm
        traits = norm or self._plan.norm
        q_norm, k_norm = (None if norm is None else random.norm(size).weight for _ in range(2))
        angles = random.normal(self._rows, size // 2, dtype=torch.float32)
        return HeadRotation(q_norm, k_norm, traits.eps, traits.offset, angles.cos(), angles.sin())
