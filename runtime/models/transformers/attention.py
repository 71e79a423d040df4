"""The attention of a transformers model over the paged cache.

transformers passes the calling module to its attention function. So all modules of a model hold its
`CurrentStep`, which `TransformersDecoder.decode` sets for the time of a forward pass.

Shapes: T tokens, H query heads, G key/value heads, E head_dim of the cache. transformers' tensors
are `[1, heads, T, dim]`.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...bounded_repr import bounded_text
from ...errors import ConfigError
from ...kernels import AttentionForm, LayerPlace, RaggedBatch, have_triton
from ...operation_scopes import operation

# The optional package transformers, imported at its first use.

LEAST_VERSION = (5, 17)
"""Of transformers; the oldest that is tested. pyproject.toml has the same."""
_one_at_a_time = threading.RLock()


def import_transformers(
    purpose: str = "model_impl='transformers'", extra: str = "transformers"
) -> Any:
    """Return the module `transformers`; raise `ConfigError` if it is missing or too old.

    The error names the purpose, and the extra of stepgraph that installs it.
    """
    least = ".".join(map(str, LEAST_VERSION))
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs the package transformers, {least} or newer: "
            f'pip install "stepgraph[{extra}]" ({error})'
        ) from error
    found = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    if found is None or tuple(map(int, found.groups())) < LEAST_VERSION:
        raise ConfigError(
            f"{purpose} needs transformers {least} or newer, {transformers.__version__} is"
            f' installed: pip install --upgrade "stepgraph[{extra}]"'
        )
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Build or load a model, one thread at a time, without progress bars and warnings.

    While it does, transformers changes settings of the process: its loggers, the default dtype and
    functions of torch. Also suppresses torch's report of operations that fail on tensors without
    data: errors say what failed.
    """
    theirs = import_transformers().utils.logging
    with _one_at_a_time:
        level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
        fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")
        disabled, fake_tensors.disabled = fake_tensors.disabled, True
        theirs.set_verbosity_error()
        theirs.disable_progress_bar()
        try:
            yield
        finally:
            fake_tensors.disabled = disabled
            theirs.set_verbosity(level)
            if bars:
                theirs.enable_progress_bar()


@contextmanager
def convertible_parameters() -> Iterator[None]:
    """Let modules convert parameters without data, as some do while they are built.

    `Module.to` swaps the contents of fake tensors in place, which fails for most of them. Within
    `quiet`, whose lock covers this change of torch, it sets new parameters.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # slow to import

    convert: Any = nn.Module._apply

    def replace(module: nn.Module, function: Any, recurse: bool = True) -> Any:
        if not any(isinstance(parameter, FakeTensor) for parameter in module.parameters()):
            return convert(module, function, recurse)
        for child in module.children() if recurse else ():
            replace(child, function)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                converted = function(parameter.detach())
                module._parameters[name] = nn.Parameter(converted, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    nn.Module._apply = replace  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]


def reason_of(error: BaseException) -> str:
    """Describe what transformers or torch raised, with the innermost error that caused it."""
    inner = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    found = f"{type(error).__name__}: {bounded_text(error, 300)}"
    if inner is error:
        return found
    return f"{found} (because of {type(inner).__name__}: {bounded_text(inner, 300)})"


# Recognises the attention masks that transformers creates.
#
# Models create masks with functions of `transformers.masking_utils`, which pass a mask function of
# two positions to a registered interface. While a model is probed, ours returns a tensor that
# carries a description of this function. When the model runs, no masks are created: the paged
# attention derives them from positions.

MASK_FORM = "stepgraph_mask_form"
"""Attribute of a mask tensor that `probe_mask` made."""


class MaskForm(NamedTuple):
    """Which earlier tokens a token attends to."""

    window: int = 0
    """How many of the last positions, itself included; 0: all."""
    chunk: int = 0
    """Positions of a chunk; a token attends within its own; 0: all."""
    unknown: str | None = None
    """Name of a mask function that is not one of these."""


def probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    **unused: object,
) -> torch.Tensor:
    """Return an empty mask with the attribute `MASK_FORM`; the interface of transformers."""
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool)
    setattr(mask, MASK_FORM, mask_form(mask_function))
    return mask


def mask_form(function: Callable[..., Any] | None) -> MaskForm:
    """Describe a mask function, as `create_causal_mask` and its siblings make them."""
    from transformers import masking_utils as known

    if function is None or function is known.causal_mask_function:
        return MaskForm()
    inner = _cells(function)
    if _code(function) is _code(known.or_masks(known.causal_mask_function)):
        blocks = _code(known.blockwise_overlay(torch.zeros(1)))
        parts = [part for part in inner["mask_functions"] if _code(part) is not blocks]
        if len(parts) == 1:  # a text has no blocks of images or sound
            return mask_form(parts[0])
    if _code(function) is _code(known.and_masks(known.causal_mask_function)):
        forms = [mask_form(part) for part in inner["mask_functions"]]
        unknown = next((form.unknown for form in forms if form.unknown is not None), None)
        windows = [form.window for form in forms if form.window]
        chunks = [form.chunk for form in forms if form.chunk]
        causal = known.causal_mask_function in inner["mask_functions"]
        if unknown is None and (not causal or len(windows) > 1 or len(chunks) > 1):
            unknown = _name(function)
        return MaskForm(next(iter(windows), 0), next(iter(chunks), 0), unknown)
    if _code(function) is _code(known.sliding_window_overlay(1)):
        return MaskForm(window=int(inner["sliding_window"]))
    if _code(function) is _code(known.chunked_overlay(1, torch.zeros(1))):
        return MaskForm(chunk=int(inner["chunk_size"]))
    return MaskForm(unknown=_name(function))


def _code(function: Callable[..., Any]) -> CodeType | None:
    return getattr(function, "__code__", None)


def _name(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", "")
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables that a function takes from the scope that made it."""
    code, cells = _code(function), getattr(function, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


# The experts of a transformers model as two grouped products with static shapes.
#
# transformers' own implementations either read sizes on the host, gather the weights of every
# token, or exist for bfloat16 only.
#
# Shapes: T tokens, P pairs of a token and one of its experts, E experts, K input and N output
# features.

EXPERTS_IMPLEMENTATION = "stepgraph"

torch.library.define(
    "stepgraph::grouped_mm", "(Tensor x, Tensor weight, Tensor ends, bool transposed) -> Tensor"
)


@torch.library.impl("stepgraph::grouped_mm", "CPU")
def _grouped_mm_cpu(x_PK: Tensor, weight: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    """Rows up to `ends[e]` by the weight of expert e, `[N, K]`, or `[K, N]` if `transposed`."""
    out_PN = x_PK.new_empty(x_PK.shape[0], weight.shape[2 if transposed else 1])
    begin = 0
    for expert, end in enumerate(ends_E.tolist()):
        if begin < end:
            matrix_KN = weight[expert] if transposed else weight[expert].T
            torch.mm(x_PK[begin:end], matrix_KN, out=out_PN[begin:end])
        begin = end
    return out_PN


@torch.library.impl("stepgraph::grouped_mm", "CUDA")
def _grouped_mm_cuda(x_PK: Tensor, weight: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    """As on a CPU, without waiting for the device.

    Not `torch._grouped_mm`: it needs rows of whole 16 bytes, and copies `ends` to the host where
    the device has no kernel for it.
    """
    pair_P = torch.arange(x_PK.shape[0], device=x_PK.device)
    expert_P = torch.searchsorted(ends_E, pair_P, right=True)
    if have_triton():
        from ...kernels.triton.expert_blocks import product_of_rows_by_expert

        rows = (x_PK.contiguous(), weight.contiguous(), expert_P.to(torch.int32))
        return product_of_rows_by_expert(*rows, transposed=transposed)
    # Each row gathers its own weight.
    weight_EKN = weight if transposed else weight.transpose(1, 2)
    return torch.bmm(x_PK[:, None], weight_EKN[expert_P])[:, 0]


def _fake_grouped_mm(x_PK: Tensor, weight: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    return x_PK.new_empty(x_PK.shape[0], weight.shape[2 if transposed else 1])


torch.library.register_fake("stepgraph::grouped_mm", _fake_grouped_mm)


def _experts_forward(
    module: Any, hidden_TK: Tensor, chosen_TX: Tensor, weights_TX: Tensor
) -> Tensor:
    """The experts function that is registered with transformers; X experts per token."""
    per_token = chosen_TX.shape[-1]
    expert_P, order_P = torch.sort(chosen_TX.reshape(-1))
    experts = torch.arange(module.num_experts, device=hidden_TK.device)
    ends_E = torch.searchsorted(expert_P, experts, right=True)

    def product(x_PK: Tensor, name: str) -> Tensor:
        out_PN: Tensor = torch.ops.stepgraph.grouped_mm.default(
            x_PK, getattr(module, name), ends_E, module.is_transposed
        )
        return out_PN + getattr(module, f"{name}_bias")[expert_P] if module.has_bias else out_PN

    x_PK = hidden_TK[order_P // per_token]
    if module.has_gate:
        inner = module._apply_gate(product(x_PK, "gate_up_proj"))
    else:
        inner = module.act_fn(product(x_PK, "up_proj"))
    out_PK = product(inner, "down_proj")
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has no such field
        out_PK = module.post_expert_norm(out_PK)
    weighted_PK = out_PK * weights_TX.reshape(-1)[order_P, None]
    own_order = torch.empty_like(weighted_PK).index_copy(0, order_P, weighted_PK)
    summed: Tensor = own_order.view(-1, per_token, hidden_TK.shape[-1]).sum(1)
    return summed.to(hidden_TK.dtype)


IMPLEMENTATION = "stepgraph"
"""Name of our attention function in transformers; without masks."""

PROBED_IMPLEMENTATION = "stepgraph_probe"
"""The same function, with the mask function of a probe."""

_CURRENT_STEP = "stepgraph_current_step"
"""Attribute of the modules of a model."""


AttendFunction = Callable[
    [nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor
]

"""Module, query, key, value, mask and other keywords -> `[1, T, H, value_dim]`."""


class CurrentStep:
    """What attends in the forward pass that a model runs; None between its forward passes."""

    def __init__(self, model: nn.Module) -> None:
        """Make all modules of a model refer to this object."""
        self.attend: AttendFunction | None = None
        for module in model.modules():
            setattr(module, _CURRENT_STEP, self)

    @contextmanager
    def running(self, attend: AttendFunction) -> Iterator[None]:
        """Run forward passes with a function."""
        self.attend = attend
        try:
            yield
        finally:
            self.attend = None


class PagedLayer(NamedTuple):
    """An attention call of a forward pass: its place in the cache and its constants."""

    place: LayerPlace
    form: AttentionForm
    head_dim: int
    """Of the cache: the larger one of a key's and a value's elements."""


@dataclass(slots=True)
class PagedStep:
    """Attends call by call of one forward pass: the n-th call is layer n."""

    attention: Callable[..., Tensor]
    arenas: tuple[Tensor, ...]
    """The cache of each layout."""
    batch: RaggedBatch
    layers: tuple[PagedLayer, ...]
    calls: int = 0

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        keywords: dict[str, Any],
    ) -> Tensor:
        """Write the keys and values of all tokens, then attend: `[1, T, H, value_dim]`."""
        layer = self.layers[self.calls]
        self.calls += 1
        form = layer.form
        if keywords.get("s_aux") is not None:
            form = form._replace(sinks=keywords["s_aux"])
        size, dim = layer.head_dim, value.shape[-1]
        with operation("attention"):
            out_THE = self.attention(
                _tokens_first(query, size),
                _tokens_first(key, size),
                _tokens_first(value, size),
                self.arenas[layer.place.layout],
                layer.place,
                self.batch,
                form,
            )
        out = out_THE if dim == size else out_THE[..., :dim]
        return out[None]


def _tokens_first(x_1HTE: Tensor, size: int) -> Tensor:
    """Return `[T, heads, size]`, contiguous, padded with zeros."""
    x_THE = x_1HTE[0].transpose(0, 1)
    if x_THE.shape[-1] != size:
        return F.pad(x_THE, (0, size - x_THE.shape[-1]))
    return x_THE.contiguous()


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention function that is registered with transformers."""
    current: CurrentStep = getattr(module, _CURRENT_STEP)
    assert current.attend is not None, "a forward pass needs a step"
    return current.attend(module, query, key, value, attention_mask, keywords), None


def register() -> None:
    """Register our attention and experts with transformers, under names of our own. Idempotent."""
    transformers = import_transformers()
    from transformers.integrations.moe import ExpertsInterface

    transformers.AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
    transformers.AttentionInterface.register(PROBED_IMPLEMENTATION, paged_attention_forward)
    transformers.AttentionMaskInterface.register(PROBED_IMPLEMENTATION, probe_mask)
    ExpertsInterface.register(EXPERTS_IMPLEMENTATION, _experts_forward)
