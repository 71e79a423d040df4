"""Runs a model of transformers once without memory, and records what its forward pass does.

The parameters are fake tensors, which have shapes and no data. The model runs twice: as
transformers would, with masks, and as this engine runs it, from embeddings and without masks.
"""

from __future__ import annotations

import copy
import itertools
import traceback
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ...bounded_repr import bounded_repr, bounded_text
from ...errors import CheckpointError
from .attention import (
    EXPERTS_IMPLEMENTATION,
    IMPLEMENTATION,
    MASK_FORM,
    PROBED_IMPLEMENTATION,
    CurrentStep,
    MaskForm,
    quiet,
    reason_of,
)

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

# Measures the peak of live tensors, for tensors that have no data.


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate while it is active."""

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        """`held` are not counted: parameters and buffers, of which operations make views."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        """Most bytes at one time."""
        self._live = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in held}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size


# Records which torch functions use the parameters of a model while it runs.


class LinearUse(NamedTuple):
    """A linear layer that is called once, and whose weight nothing else uses."""

    module: str
    """Path of the module."""
    out_features: int
    in_features: int
    bias: bool
    transposed: bool
    """Whether its weight is `[in_features, out_features]`."""
    input: int
    """Layers with the same number have the same input."""


class ParameterUses(TorchFunctionMode):
    """Counts the uses of each parameter, and the products with a weight by their inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._parameters = {id(p) for p in model.parameters()}
        self._uses: Counter[int] = Counter()
        self._described: set[int] = set()
        """Parameters whose properties are read."""
        self._products: dict[int, int] = {}
        """Number of the input of the product with a weight, by id of the weight."""
        self._inputs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._serial = itertools.count()
        self._rows: Counter[int] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        values = [*args, *keywords.values()]
        used = [id(v) for v in values if isinstance(v, Tensor) and id(v) in self._parameters]
        if getattr(func, "__name__", "") == "__get__":  # of a property such as dtype
            self._described.update(used)
        else:
            self._uses.update(used)
        if func is F.linear:
            weight = keywords.get("weight", args[1] if len(args) > 1 else None)
            self._products[id(weight)] = self._number(keywords.get("input", args[0]))
        elif func is torch.addmm and len(args) == 3:  # Conv1D
            self._products[id(args[2])] = self._number(args[1])
        elif func is F.embedding:
            self._rows[id(keywords.get("weight", args[1] if len(args) > 1 else None))] += 1
        return func(*args, **keywords)

    def _number(self, x: Tensor) -> int:
        """Return a number of a tensor's contents, the same for a flattened view of it."""
        base = x._base
        if base is not None and x.numel() == base.numel() and x.is_contiguous():
            x = base
        version, number = self._inputs.get(x, (None, 0))
        if version != x._version:
            number = next(self._serial)
            self._inputs[x] = x._version, number
        return int(number)

    def looks_up_rows(self, module: nn.Module) -> bool:
        """Whether an embedding reads rows of its weight, which only it and products use.

        It may do something with the rows, such as to scale them.
        """
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            return False
        key = id(module.weight)
        return self._rows[key] == 1 and self._uses[key] == 1 + (key in self._products)

    def linears(self, attention: Iterable[str]) -> Iterator[LinearUse]:
        """Yield the linear layers that may be replaced, in the order of their calls.

        These are called once each. Their weight is not read by anything else but the input
        embeddings. Routers, which have an output for each expert and are outside of the modules
        `attention`, are left out: a rounded score sends a token to another expert.
        """
        from transformers.pytorch_utils import Conv1D

        experts = {getattr(module, "num_experts", None) for module in self._model.modules()}
        inside = tuple(f"{path}." for path in attention)
        owners: dict[int, list[tuple[str, nn.Module]]] = {}
        for path, module in self._model.named_modules(remove_duplicate=False):
            if type(module) in (nn.Linear, Conv1D):
                owners.setdefault(id(module.weight), []).append((path, module))
        for key, number in self._products.items():
            if len(owners.get(key, ())) != 1 or self._uses[key] != 1 + self._rows[key]:
                continue
            if key in self._described and not self._rows[key]:
                continue  # its module needs a weight, where an embedding keeps its own
            ((path, module),) = owners[key]
            transposed = type(module) is Conv1D
            weight: Any = module.weight
            rows, columns = weight.T.shape if transposed else weight.shape
            if rows not in experts or path.startswith(inside):
                has_bias = module.bias is not None
                yield LinearUse(path, rows, columns, has_bias, transposed, number)


# The part of a causal language model after its final hidden states.
#
# Models may scale or cap their logits in `forward`. So logits are computed by the model's own
# `forward`, in a shallow copy of the model whose base returns given hidden states.


class _GivenStates(nn.Module):
    """Stands for the base of a model: returns its input as the final hidden states."""

    def __init__(self, output: type[Any]) -> None:
        super().__init__()
        self._output = output

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **unused: object,
    ) -> Any:
        return self._output(last_hidden_state=inputs_embeds)


def head_of(model: nn.Module, base: str, output: type[Any]) -> nn.Module:
    """Return a copy of a model in which its base, at this path, is replaced by `_GivenStates`."""
    return _with(model, base, _GivenStates(output))


def _with(module: nn.Module, path: str, replacement: nn.Module) -> nn.Module:
    first, _, rest = path.partition(".")
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    inner = module.get_submodule(first)
    copied._modules[first] = _with(inner, rest, replacement) if rest else replacement
    return copied


def run_head(head: nn.Module, hidden_1TD: Tensor) -> Tensor:
    """Return logits `[1, T, vocab_size]` of final hidden states."""
    logits: Tensor = head(inputs_embeds=hidden_1TD, use_cache=False).logits
    return logits


_TOKENS = 61
"""Tokens of a probe; a number that no size of a model equals."""

_WITHOUT_EFFECT = frozenset(
    {
        "dropout",
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "is_causal",
        "sliding_window",
        "num_items_in_batch",
        "logits_to_keep",
        "return_dict",
    }
)

"""Keywords of an attention call that do not change its result here: masks decide about windows."""

_KNOWN = _WITHOUT_EFFECT | {"scaling", "softcap", "s_aux"}


class AttentionCall(NamedTuple):
    """A call of the attention function."""

    module: str
    """Path of the attention module."""
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float
    sinks: str | None
    """Name of the parameter with the attention sink of each head."""
    mask: MaskForm


class Probe(NamedTuple):
    """What the forward pass of a model does."""

    base: str
    """Path of the module that returns the final hidden states."""
    output: type[Any]
    """The class of its result."""
    attention: tuple[AttentionCall, ...]
    layers: tuple[str, ...]
    """Path of the decoder layer of each call, with a dot."""
    linears: tuple[LinearUse, ...]
    embedding: str
    """Path of the module of the input embeddings."""
    packed_embedding: bool
    """Whether it looks up rows of its weight, so that a projection can store it."""
    tied: bool
    """Whether the input embeddings share their weight with a linear layer, the head."""
    hidden_size: int
    vocab_size: int
    activation_bytes: int
    """Peak of the tensors of one token."""


def probe_model(model: Any, fake: FakeTensorMode, name: str) -> Probe:
    """Record the forward pass of a model of fake tensors.

    Args:
        model: an `AutoModelForCausalLM`.
        fake: the mode of its tensors.
        name: of its class, for messages.

    Raises:
        CheckpointError: this engine cannot run it; the message says what was found.
    """
    recorder = _Recorder(model, name)
    with fake, torch.no_grad(), quiet(), CurrentStep(model).running(recorder.attend):
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
        positions = torch.arange(_TOKENS)[None]
        set_implementation(model, PROBED_IMPLEMENTATION)
        embeddings = model.get_input_embeddings()
        with recorder.watching_base():
            recorder.run(
                model, input_ids=ids, attention_mask=torch.ones_like(positions), use_cache=False
            )
        attention, layers = recorder.finish_attention()
        path, output = recorder.base()
        set_implementation(model, IMPLEMENTATION)
        base, head = model.get_submodule(path), head_of(model, path, output)
        uses = ParameterUses(model)
        live = LiveBytes([*model.parameters(), *model.buffers()])
        recorder.calls.clear()
        with live, uses:
            x = recorder.run(embeddings, ids)
            given = {"inputs_embeds": x, "position_ids": positions, "use_cache": False}
            hidden = recorder.run(base, **given).last_hidden_state
            activation_bytes = live.peak // _TOKENS  # logits are planned for themselves
            logits = recorder.run(run_head, head, hidden)
        if len(recorder.calls) != len(attention):
            raise recorder.unfit(
                f"its attention runs {len(recorder.calls)} times without masks and"
                f" {len(attention)} times with them"
            )
        if x.shape != hidden.shape:
            raise recorder.unfit(
                f"its embeddings have {x.shape[-1]} features, its hidden states {hidden.shape[-1]}"
            )
        weight = embeddings.weight
        linears = tuple(uses.linears(call.module for call in attention))
        return Probe(
            base=path,
            output=output,
            attention=attention,
            layers=layers,
            linears=linears,
            embedding=recorder.paths[id(embeddings)],
            packed_embedding=uses.looks_up_rows(embeddings),
            tied=any(model.get_submodule(use.module).weight is weight for use in linears),
            hidden_size=hidden.shape[-1],
            vocab_size=logits.shape[-1],
            activation_bytes=activation_bytes,
        )


def set_implementation(model: Any, name: str) -> None:
    """Make every part of a model use a registered attention function, and our experts."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name
            config._experts_implementation = EXPERTS_IMPLEMENTATION


class _Recorder:
    """Records the attention of a probe."""

    def __init__(self, model: Any, name: str) -> None:
        self._model = model
        self._name = name
        self.paths = {id(module): path for path, module in model.named_modules()}
        """Path of each module, by its id."""
        self._parameters = {id(parameter): path for path, parameter in model.named_parameters()}
        self._bases: list[tuple[str, type[Any]]] = []
        self.calls: list[AttentionCall] = []

    def unfit(self, found: str) -> CheckpointError:
        """Return the error for a model that this engine cannot run."""
        return CheckpointError(
            f"{self._name} of transformers cannot run here: {found}. model_impl='transformers'"
            " needs decoders whose layers call transformers' attention interface once each, with"
            " causal, sliding-window or chunked masks; use transformers itself for this model"
        )

    def run(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call a part of the model; convert what it raises."""
        try:
            return function(*arguments, **keywords)
        except CheckpointError:
            raise
        except Exception as error:
            raise self.unfit(_failure(error)) from error

    @contextmanager
    def watching_base(self) -> Iterator[None]:
        """Record the outermost modules with an output of final hidden states."""
        with ExitStack() as hooks:
            for path, module in self._model.named_modules():
                if path:

                    def hook(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
                        if isinstance(getattr(output, "last_hidden_state", None), Tensor):
                            self._bases.append((path, type(output)))

                    hooks.callback(module.register_forward_hook(hook).remove)
            yield

    def base(self) -> tuple[str, type[Any]]:
        """Return the path and output class of the module that contains all attention."""
        inside = [
            found
            for found in self._bases
            if all(call.module.startswith(found[0] + ".") for call in self.calls)
        ]
        if not inside:
            raise self.unfit("no module of it returns the final hidden states (last_hidden_state)")
        return min(inside, key=lambda found: len(found[0]))

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        keywords: dict[str, Any],
    ) -> Tensor:
        """Record the call; raise `CheckpointError` for what the paged attention cannot do."""
        path = self.paths.get(id(module), type(module).__name__)
        for name, given in keywords.items():
            if name not in _KNOWN and given is not None and given is not False:
                raise self.unfit(
                    f"{path} passes {bounded_text(name, 60)} = {bounded_repr(given, 60)} to its"
                    " attention, which has an unknown effect"
                )
        form = MaskForm() if mask is None else getattr(mask, MASK_FORM, None)
        if form is None:
            raise self.unfit(f"{path} attends with a mask that the model made or changed")
        causal = keywords.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", True)
        if mask is None and not causal:
            raise self.unfit(f"{path} attends in both directions (is_causal is False)")
        if form.unknown is not None:
            raise self.unfit(f"{path} attends with the mask function {form.unknown}")
        if min(form.window, form.chunk) < 0 or 0 in (*query.shape, *key.shape, *value.shape):
            raise self.unfit(
                f"{path} attends to a negative number of tokens, or with heads of no elements"
            )
        tokens = query.shape[2]
        if query.shape[0] != 1 or tokens != _TOKENS or key.shape[2] != tokens:
            raise self.unfit(
                f"{path} attends from {query.shape[0]} x {tokens} queries to {key.shape[2]} keys"
                f" where the input has {_TOKENS} tokens"
            )
        scaling, sinks = keywords.get("scaling"), keywords.get("s_aux")
        if isinstance(scaling, Tensor) or isinstance(keywords.get("softcap"), Tensor):
            raise self.unfit(f"{path} scales its attention by a tensor")
        if sinks is not None and (
            id(sinks) not in self._parameters or tuple(sinks.shape) != (query.shape[1],)
        ):
            raise self.unfit(f"{path} has attention sinks (s_aux) that are no parameter of [heads]")
        self.calls.append(
            AttentionCall(
                module=path,
                heads=query.shape[1],
                kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
                softcap=float(keywords.get("softcap") or 0.0),
                sinks=None if sinks is None else self._parameters[id(sinks)],
                mask=form,
            )
        )
        return value.new_empty(1, tokens, query.shape[1], value.shape[3])

    def finish_attention(self) -> tuple[tuple[AttentionCall, ...], tuple[str, ...]]:
        """Return the calls, checked to be one per layer, and the paths of their layers."""
        found = [call.module for call in self.calls]
        if not found:
            raise self.unfit("it does not call transformers' attention interface")
        for path in found:
            if found.count(path) > 1:
                raise self.unfit(f"{path} attends {found.count(path)} times in a forward pass")
        prefixes = layer_prefixes(found)
        if not prefixes:
            raise self.unfit(f"{found[0]} is not in a list of decoder layers")
        path = prefixes[0].removesuffix(".").rpartition(".")[0]
        layers = [f"{path}.{n}." for n, _ in self._model.get_submodule(path).named_children()]
        without = [layer.removesuffix(".") for layer in layers if layer not in prefixes]
        if without:
            raise self.unfit(
                f"{len(without)} of its {len(layers)} layers do not call transformers' attention"
                f" interface, e.g. {without[0]}: what a state-space, convolution or linear"
                " attention layer keeps of a sequence is not in the cache"
            )
        return tuple(self.calls), prefixes


def layer_prefixes(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the path of the layer of each attention module, with a dot; () if there is no list.

    The layers of a list differ in one component of their path: `h.0.attn`, `h.1.attn`.
    """
    for i, part in enumerate(modules[0].split(".")):
        prefixes = tuple(".".join(path.split(".")[: i + 1]) + "." for path in modules)
        if part.isdigit() and len(set(prefixes)) == len(prefixes):
            return prefixes
    return ()


def _failure(error: Exception) -> str:
    """Describe what a forward pass raised, with the line of the model."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if "modeling_" in frame.filename:
            place = f" at {Path(frame.filename).name}:{frame.lineno}"
    return f"its forward pass fails on {_TOKENS} tokens without data,{place} ({reason_of(error)})"
