"""The self-test of a GPU's operations: each one that a step calls, against its plain version.

`OperationChecks.operations` are `Operations` that run both versions of each operation over the same
inputs and compare the results. One step of a model with random weights checks every operation that
the model uses, with the arguments of that model. The step continues with the plain results, so the
error of an operation does not reach the next one.

The native version writes to copies. Outputs, and memory that it allocates, hold NaN (-1 for
integers) beforehand. Guards around the outputs must still hold it afterwards, and the parts of the
cache that the operation must not write must be unchanged.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.batch import RaggedBatch
from ..ops.feedback import Feedback
from ..ops.kv_storage import read_blocks as read_side
from ..result_check import Fallback, brief, disagreement, require_usable_device, tolerance
from .expert_routing import Routed, reference_routed
from .filled_memory import FilledMemory, poison
from .linear import Pending
from .operations import Operations
from .split_attention import Partials, reference_combine_splits

__all__ = ["WRITES", "OperationChecks", "OutputCopies", "Writes", "written_tensors"]

_GUARD = 256
"""Elements of each guard around an output; keeps it aligned."""
_SHOWN = 3
"""Tensors of a call that a report names."""
_MOST_DIFFERENT_CHOICES = 0.02
"""Share of the tokens that may choose experts with the same scores as others."""
_ATTENDS = ("prefill_attention", "paged_attention")
"""Operations that return the attention of each token."""


class Writes(NamedTuple):
    """Parameters that an operation writes to, besides what it returns."""

    outputs: tuple[str, ...] = ()
    """Written as a whole: a tensor, `Pending` (its `out`) or `Partials`."""
    updates: tuple[str, ...] = ()
    """Written in part; the rest stays as it is."""


WRITES: dict[str, Writes] = {
    "begin_decode": Writes(),
    "norm_linear": Writes(("out_TN", "pending")),
    "decode_attention": Writes(("partials", "attended_TN"), ("arena", "counters")),
    "residual_linear": Writes(("out_TN",)),
    "combine_output": Writes(("out_TN",)),
    "gate_up": Writes(("out_TF", "pending")),
    "norm_rows": Writes(("out_TD", "pending")),
    "sum_rows": Writes(("sum_TD", "out_TD")),
    "activate_rows": Writes(("out_TF",)),
    "linear": Writes(("out_TN",)),
    "route": Writes(),
    "experts": Writes(("out_TD",)),
    "rotate_and_store": Writes(updates=("arena",)),
    "prefill_tiles": Writes(),
    "prefill_attention": Writes(),
    "paged_attention": Writes(updates=("arena",)),
    "head": Writes(("pending",)),
    "pick_greedy": Writes(updates=("feed",)),
    "pick_of_ranks": Writes(updates=("feed",)),
}
"""Of each field of `Operations`; parameters as its plain version names them."""


class OperationChecks:
    """Both versions of every operation, compared wherever one is called."""

    def __init__(
        self,
        dtype: torch.dtype,
        storage: str,
        block_size: int,
        device: torch.device,
        native: Operations | None = None,
    ) -> None:
        """Check operations of a model in `dtype` over a cache of this storage.

        They are those of `native`; None: `Operations.native`.
        """
        self.failures: dict[str, Fallback] = {}
        """The first failure of each operation that failed."""
        self.checked: set[str] = set()
        """Operations that were called."""
        self.read_blocks = 1
        """Columns of block tables that have positions in use: what plain torch reads."""
        self.tokens = 1
        """Tokens of the step without its padding, whose attention is undefined."""
        self._limit = tolerance(dtype)
        self._cache_limit = tolerance(dtype, storage)
        self._storage, self._block_size, self._device = storage, block_size, device
        self._native = native = native or Operations.native()
        reference = Operations.reference()
        self.operations = Operations(
            **{
                field.name: self._both(
                    field.name, getattr(native, field.name), getattr(reference, field.name)
                )
                for field in dataclasses.fields(Operations)
            }
        )
        """Runs and compares both versions; results are the plain ones."""

    def passed(self) -> Operations:
        """The native operations, with the plain versions of those that failed."""
        return self._native.with_reference(self.failures)

    def _both(
        self, name: str, native: Callable[..., Any], reference: Callable[..., Any]
    ) -> Callable[..., Any]:
        signature, writes = inspect.signature(reference), WRITES[name]

        def call(*args: Any, **keywords: Any) -> Any:
            self.checked.add(name)
            given = signature.bind(*args, **keywords)
            copies = OutputCopies(given, writes)
            found: Any = None
            error = None
            if name not in self.failures:
                try:
                    with FilledMemory(poison):
                        found = native(*copies.given.args, **copies.given.kwargs)
                    self._wait()
                except Exception as failure:  # a compiler and a device raise anything
                    called = f"{name} ({_shapes(given)})"
                    require_usable_device(called, self._device, failure)
                    error = brief(failure)
            batch = given.arguments.get("batch")
            if isinstance(batch, RaggedBatch):
                narrowed = dataclasses.replace(batch, read_blocks=self.read_blocks)
                given.arguments["batch"] = narrowed
            result = reference(*given.args, **given.kwargs)
            if name not in self.failures:
                error = error or self._difference(name, copies, given, found, result)
                if error is not None:
                    self.failures[name] = Fallback(name, _shapes(given), error)
            return result

        return call

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _difference(
        self,
        name: str,
        copies: OutputCopies,
        given: inspect.BoundArguments,
        found: Any,
        expected: Any,
    ) -> str | None:
        """How the native results differ from the plain ones, or None."""
        attends = "attention" in name or "store" in name
        limit = self._cache_limit if attends else self._limit
        if problem := copies.overrun():
            return problem
        if name == "head":
            if problem := _head_difference(found, expected[0], limit):
                return problem
        elif name == "route":
            if problem := _route_difference(found, expected, given, limit):
                return problem
        else:
            for one, other in zip(_tensors(found), _tensors(expected), strict=True):
                count = self.tokens if name in _ATTENDS else None
                if problem := disagreement(one[:count], other[:count], limit):
                    return problem
        both = (
            written_tensors(arguments, copies.writes, self._stored)
            for arguments in (copies.given, given)
        )
        for (parameter, written), (_, right) in zip(*both, strict=True):
            if problem := disagreement(written, right, limit):
                return f"{parameter.partition('_')[0]}: {problem}"
        return None

    def _stored(self, arena: Tensor) -> Tensor:
        """All vectors of the cache but those of padding, dequantised; poisoned ones are NaN."""
        blocks = torch.arange(1, arena.shape[2], device=arena.device)
        sides = arena.flatten(0, 1)
        return torch.stack([read_side(s, blocks, self._block_size, self._storage) for s in sides])


def written_tensors(
    given: inspect.BoundArguments, writes: Writes, stored: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter that a call wrote, and the result in it.

    Args:
        given: arguments of the call.
        writes: those that it writes.
        stored: reads the vectors to compare from the arena.
    """
    arguments = given.arguments
    for parameter in (*writes.outputs, *writes.updates):
        match arguments.get(parameter):
            case Partials() as partials:
                if arguments.get("attended_TN") is None:  # else attention has combined them
                    yield parameter, reference_combine_splits(partials)
            case Pending() as pending:
                yield parameter, pending.out
            case Feedback() as feed:
                yield parameter, torch.cat((feed.token_ids, feed.state_positions))
            case Tensor() as tensor:
                yield parameter, stored(tensor) if parameter == "arena" else tensor


class OutputCopies:
    """The arguments of a call, with copies of those that are written.

    Attributes:
        given: the arguments; outputs are poisoned, updates hold what they held.
        writes: which of them are copies.
    """

    def __init__(self, given: inspect.BoundArguments, writes: Writes) -> None:
        """Copy the arguments that `writes` names."""
        self.writes = writes
        self.given = inspect.BoundArguments(given.signature, given.arguments.copy())
        self._guards: list[Tensor] = []
        arguments = self.given.arguments
        for parameter in writes.outputs:
            value = arguments.get(parameter)
            if isinstance(value, Tensor):
                arguments[parameter] = self._guarded(value)
            elif isinstance(value, Pending):
                arguments[parameter] = value._replace(out=self._guarded(value.out))
            elif isinstance(value, Partials):
                arguments[parameter] = Partials(*map(self._guarded, value))
        for parameter in writes.updates:
            value = arguments.get(parameter)
            if isinstance(value, Feedback):
                arguments[parameter] = value._replace(
                    token_ids=value.token_ids.clone(),
                    state_positions=value.state_positions.clone(),
                )
            elif value is not None:
                arguments[parameter] = value.clone()

    def _guarded(self, like: Tensor) -> Tensor:
        assert like.is_contiguous()
        whole = like.new_empty(like.numel() + 2 * _GUARD)
        poison(whole)
        self._guards += [whole[:_GUARD], whole[-_GUARD:]]
        return whole[_GUARD:-_GUARD].view(like.shape)

    def overrun(self) -> str | None:
        """Return an error if memory around an output was written."""
        if not self._guards or bool(torch.stack([g.isnan().all() for g in self._guards]).all()):
            return None
        return "it writes outside of its outputs"


def _head_difference(found: Any, logits_TV: Tensor, limit: float) -> str | None:
    """Compare the logits. The best of each chunk must be one of the native logits, and the best of
    all chunks the largest: both versions need not have the same chunks."""
    own_TV, maxima_TC, ids_TC = found
    if problem := disagreement(own_TV, logits_TV, limit):
        return problem
    inside = ((ids_TC >= 0) & (ids_TC < own_TV.shape[1])).all()
    at_TC = own_TV.float().gather(1, ids_TC.long().clamp(0, own_TV.shape[1] - 1))
    best_T = own_TV.float().amax(-1)
    right = inside & (at_TC == maxima_TC).all() & (maxima_TC.amax(-1) == best_T).all()
    return None if bool(right) else "the best tokens of its chunks are not those of its logits"


def _route_difference(
    found: Routed, expected: Routed, given: inspect.BoundArguments, limit: float
) -> str | None:
    """Compare the logits, and the choice with that of plain torch from the same logits.

    Where scores are equal but for their rounding, both versions may choose differently.
    """
    if problem := disagreement(found.logits, expected.logits, limit):
        return problem
    op, tensors = given.arguments["op"], given.arguments["tensors"]
    live_T = given.arguments.get("live_T")
    same = reference_routed(op, found.logits, tensors.correction, live_T)
    if problem := disagreement(found.weights, same.weights, limit):
        return problem
    different = (found.experts != same.experts).any(-1).float().mean()
    return None if float(different) <= _MOST_DIFFERENT_CHOICES else "it chooses other experts"


def _tensors(result: Any) -> Iterator[Tensor]:
    """The tensors that an operation returned, in order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(result):
        for field in dataclasses.fields(result):
            yield from _tensors(getattr(result, field.name))


def _shapes(given: inspect.BoundArguments) -> str:
    """The first tensors of a call, as `x_TK [8, 2048] bfloat16`."""
    shown = []
    for name, value in given.arguments.items():
        tensor = value if isinstance(value, Tensor) else getattr(value, "weight", None)
        if isinstance(tensor, Tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            shown.append(f"{name.rstrip('_')} {list(tensor.shape)} {dtype}")
    return ", ".join(shown[:_SHOWN])
