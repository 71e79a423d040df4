"""The memory plan of a model, without loading the model or owning the device."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ...cache.arena import Arena
from ...cache.memory.device_memory import DeviceMemory
from ...cache.memory.handler import MemoryBudgetError, format_bytes, plan_memory
from ...cache.spec import group_layers
from ..config import MAX_ROWS, EngineConfig
from ..engine.memory import StatePlan, model_footprint
from ..engine.startup import plan_engine, planned_kernels
from ..kernels import Kernels, Mode, native_obstacle
from ..kernels.ops.experts import Experts
from ..kernels.ops.layer_plan import ModelPlan
from ..kernels.weights import MODEL
from ..loading.loader import planned_codes, resolve_source
from ..models.config import DecoderConfig
from ..models.plan import parameter_bytes, plan_of, shard_config
from ..models.resolved_config import (
    ResolvedConfig,
    check_batch_invariant,
    resolve_kernels,
    resolve_masks,
)

_CONTEXTS = (1024, 8192)
"""Context length for which the number of rows is reported, in addition to the model's own."""


def explain_memory(
    source: str | Path, config: EngineConfig, device_memory: int | None = None
) -> str:
    """Return the memory plan of a model as text: its terms, and what fits.

    Args:
        source: as `Engine.from_pretrained`; only the configuration is read, and headers of
            weights if they are there.
        config: how the engine would run; with `device_memory`, `auto` is a CUDA device in its
            fastest mode. With `tensor_parallel` the plan is the first rank's; other plans differ
            by a row of the vocabulary.
        device_memory: bytes of a hypothetical device; None: the free memory of the device. Ranks
            on a CPU share its memory equally.

    Raises:
        CheckpointError: as `Engine.from_pretrained`.
        ConfigError: the configuration cannot work with this model.
        MemoryBudgetError: the device has no room for the model and the smallest cache.
    """
    found = resolve_source(source, config_only=True, model_impl=config.model_impl)
    whole = found.config
    ranks = config.tensor_parallel
    model = shard_config(whole, 0, ranks)
    if device_memory is None:
        resolved = ResolvedConfig.resolve(config, model)
        memory = DeviceMemory.of(resolved.device)
        place = f"{resolved.device}, {format_bytes(memory.available)} free"
    else:
        resolved = resolve_absent(config, model)
        host = DeviceMemory.of(torch.device("cpu")).host_available
        shared = resolved.device.type == "cpu"
        memory = DeviceMemory(device_memory, shared, device_memory if shared else host)
        place = f"{resolved.device.type} with {format_bytes(device_memory)}"
    memory = memory.of_rank(ranks)
    kernels = planned_kernels(model, resolved)
    kernels = planned_codes(dataclasses.replace(found, config=model), kernels, resolved.dtype)
    groups = group_layers(plan_of(model).states)
    plan = plan_engine(model, resolved, kernels, groups, memory)
    meta = torch.device("meta")
    kv = len(groups) * Arena(groups, 1, 1, resolved.dtype, meta, resolved.storage).nbytes
    return "\n".join(
        [
            f"{source} in {describe_stored(resolved)}, on {place}, {resolved.mode}, "
            + num_rows(config.max_num_seqs),
            f"layer groups: {len(groups)}; cache of a token: {format_bytes(kv)}",
            *_describe_shard(plan_of(whole), plan_of(model), kernels, resolved.dtype),
            *describe_states(plan_of(model), resolved),
            *describe_experts(plan_of(model), config.max_num_seqs),
            "",
            plan.format(),
            "",
            *_answers(model, resolved, kernels, memory, plan.budget_bytes),
        ]
    )


def describe_stored(config: ResolvedConfig) -> str:
    """Return the dtype of a model, of its weights where it differs, and of its cache."""
    dtype = str(config.dtype).removeprefix("torch.")
    weights = "" if config.weights == MODEL else f", weights in {config.weights}"
    return f"{dtype}{weights}, cache in {dtype if config.storage == 'model' else config.storage}"


def describe_states(plan: ModelPlan, config: ResolvedConfig) -> list[str]:
    """Return a line about the recurrent state of a model, if it has any."""
    states = StatePlan.of(plan, config)
    if states is None:
        return []
    row, cached = states.row_bytes // config.user.max_num_seqs, states.snapshot_bytes
    snapshot, token = states.layout.snapshot_bytes, states.layout.token_bytes
    return [
        f"recurrent state of a row: {format_bytes(row)}; a snapshot of it {format_bytes(snapshot)},"
        f" the inputs of a token {format_bytes(token)}; {cached // snapshot:,} cached snapshots"
    ]


def describe_experts(plan: ModelPlan, rows: int) -> list[str]:
    """Return a line for each kind of mixture: how many experts a step of `rows` rows reads."""
    counts = Counter(
        (op.routed, op.routing.top_k, op.shared, op.expected_experts(rows))
        for layer in plan.layers
        for op in layer.operations
        if isinstance(op, Experts)
    )
    return [
        f"{layers} layers with {routed} experts, {top_k} of them a token"
        + (f", and {shared} shared" if shared else "")
        + f": a step of {num_rows(rows)} reads {expected:.1f} of {routed + shared} on average, if"
        " all are equally likely"
        for (routed, top_k, shared, expected), layers in counts.items()
    ]


def _describe_shard(
    whole: ModelPlan, plan: ModelPlan, kernels: Kernels, dtype: torch.dtype
) -> list[str]:
    """Return lines about a rank's plan: what it holds of the model, and what all ranks hold."""
    if plan.shard is None:
        return []
    total = sum(parameter_bytes(p, kernels, dtype) for p in whole.parameters())
    sizes = [(p.cut is None, parameter_bytes(p, kernels, dtype)) for p in plan.parameters()]
    own, replicated = (sum(n for copied, n in sizes if copied is kind) for kind in (False, True))
    attend, all_heads = plan.attend, whole.attend
    holders = plan.shard.ranks * attend.kv_heads // all_heads.kv_heads
    cache = "a latent of all heads" if attend.shared_values else "key/value heads"
    held = f"{attend.kv_heads} of {all_heads.kv_heads} {cache}"
    return [
        f"rank {plan.shard.rank} of {plan.shard.ranks}: {attend.heads} of {all_heads.heads} query"
        f" heads, {len(plan.shard.vocab):,} of {plan.vocab_size:,} tokens of the vocabulary",
        f"weights: {format_bytes(own)} of its own, {format_bytes(replicated)} replicated on every"
        f" rank, of {format_bytes(total)} of the model",
        f"cache: {held}" + (f", replicated on {holders} ranks" if holders > 1 else ""),
    ]


def resolve_absent(config: EngineConfig, model: DecoderConfig) -> ResolvedConfig:
    """Make the choices of `ResolvedConfig.resolve` without asking for the device.

    Raises as it.
    """
    if config.device not in ("auto", "cuda") and not config.device.startswith("cuda:"):
        return ResolvedConfig.resolve(config, model)
    on_cpu = dataclasses.replace(
        config, device="cpu", mode="eager", kernels="torch", batch_invariant=False
    )
    resolved = ResolvedConfig.resolve(on_cpu, model)
    mode: Mode = "graph" if config.mode == "auto" else config.mode
    obstacle = native_obstacle("cuda", resolved.dtype, resolved.weights, plan_of(model))
    device = torch.device("cuda")
    kernels = resolve_kernels(config.kernels, mode, obstacle)
    if config.batch_invariant:
        check_batch_invariant(config, device, resolved.dtype, resolved.weights, model)
        kernels = "native"
    return dataclasses.replace(
        resolved,
        user=config,
        device=device,
        kernels=kernels,
        native_obstacle=obstacle,
        mode=mode,
        structured_output=resolve_masks(config, device, mode, kernels),
    )


def _answers(
    model: DecoderConfig,
    config: ResolvedConfig,
    kernels: Kernels,
    memory: DeviceMemory,
    budget_bytes: int,
) -> list[str]:
    """Return a line for each context and number of rows: how much of the other one fits."""

    def fits(rows: int, tokens: int) -> bool:
        """Whether `rows` requests of `tokens` tokens fit together, with full prefill chunks."""
        user = dataclasses.replace(
            config.user, max_num_seqs=rows, max_batch_tokens=None, buckets=None
        )
        changed = dataclasses.replace(config, user=user, max_model_len=tokens)
        groups = group_layers(plan_of(model).states)
        footprint = model_footprint(
            model, changed, kernels, groups, host_shared=memory.shared_with_os
        )
        try:
            plan_memory(
                footprint,
                available_bytes=memory.available,
                budget_bytes=budget_bytes,
                num_blocks=footprint.most_blocks,
                max_batch_tokens=footprint.most_batch_tokens,
            )
        except MemoryBudgetError:
            return False
        return True

    def most(limit: int, unit: str, whose: str, one_fits: Callable[[int], bool]) -> str:
        """Say how many fit, where all smaller numbers do."""
        found = bisect_right(range(1, limit + 1), False, key=lambda n: not one_fits(n))
        if not found:
            return "none fits"
        return f"{found:,}{unit}" + (f", the {whose} maximum" if found == limit else "")

    own, lines = config.max_model_len, []
    for rows in dict.fromkeys((1, config.user.max_num_seqs)):
        answer = most(own, " tokens", "model's", partial(fits, rows))
        lines.append(f"longest context of {num_rows(rows)}: {answer}")
    for tokens in dict.fromkeys([*(c for c in _CONTEXTS if c < own), own]):
        answer = most(MAX_ROWS, "", "engine's", partial(fits, tokens=tokens))
        lines.append(f"most rows of {tokens:,} tokens: {answer}")
    return lines


def num_rows(count: int) -> str:
    """Return `1 row`, `2 rows` and so on."""
    return f"{count:,} {'row' if count == 1 else 'rows'}"
