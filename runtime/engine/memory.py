"""The memory of a model: predicted before its weights are loaded, and measured at the start.

All sizes are bytes. Permanent tensors have known sizes. Activations and logits exist only within a
step, so on CUDA the peaks of the largest steps are read: a prefill step for activations, and a
decode step with the full sampler for logits, which read one width of the cache. Replays of captured
steps have no peak to read, so their warm-ups are measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch

from ...cache.arena import Arena, StateMemory
from ...cache.memory.device_memory import resident_bytes
from ...cache.memory.handler import ModelFootprint
from ...cache.row_states import RowPools
from ...cache.spec import LayerGroup, RowLayout, row_layout
from ...graphs.buffers import allocated_bytes
from ..errors import ConfigError
from ..execution.inputs import DeviceRows, input_layouts
from ..execution.outputs import OUTPUT_SETS, HostOutputs, PromptScorer, slice_tokens
from ..execution.runner import Runner
from ..execution.step_key import StepKey, StepSizes
from ..kernels import Experts, Kernels, reference_experts
from ..kernels.ops.attention import Attend
from ..kernels.ops.experts import converted_bytes
from ..kernels.ops.experts_operator import opaque_experts
from ..kernels.ops.layer_plan import ModelPlan
from ..models.config import DecoderConfig
from ..models.drafters.drafter import DrafterConfig
from ..models.plan import parameter_bytes, plan_of
from ..models.resolved_config import ResolvedConfig
from ..models.transformers.decoder import DecoderModel

GRAPH_BYTES_PER_STEP = 4 << 20
"""Memory of a captured step outside of the shared pool: its kernel nodes. An estimate, which the
plan's reconciliation compares with the measurement."""

CPU_HEAP_FACTOR = Fraction(7, 2)
"""Resident bytes of a step for each byte of its tensors, on a CPU: an upper bound. The C library
keeps memory that is freed between operations, which fragments. Measured were 1.7 to 3.4 times the
tensors, and 1.1 times with a fixed MALLOC_MMAP_THRESHOLD_ (glibc; demo and preset:smollm2-135m)."""

CPU_STEP_BYTES = 1 << 20
"""Growth of the resident set in the smallest step: pages of the heap and of code, and the accuracy
of the kernel's counters."""

RESERVE_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes to leave free, for workspaces of libraries and fragmentation."""

_META = torch.device("meta")


class FoundDrafter(NamedTuple):
    """A drafter that fits the model of an engine, before its weights are read."""

    config: DrafterConfig
    layers: LayerGroup
    """Its layers; the index names the model's layer group whose block tables it uses."""


class StatePlan(NamedTuple):
    """The memory of recurrent state of an engine."""

    layout: RowLayout
    pools: RowPools
    row_bytes: int
    """Bytes of what all rows need."""
    snapshot_bytes: int
    """Bytes of snapshots that are cached besides."""
    host_bytes: int
    """Of swapped requests."""

    @staticmethod
    def of(plan: ModelPlan, config: ResolvedConfig) -> StatePlan | None:
        """Return the memory of a model; None if it has no recurrent layers."""
        user = config.user
        if not plan.row_states:
            return None
        layout = row_layout(plan.row_states, config.dtype.itemsize)
        snapshot, inputs = layout.snapshot_bytes, layout.token_bytes * user.block_size
        kept = user.snapshot_bytes
        if kept is None:
            kept = max(2 * user.max_num_seqs * snapshot, _SNAPSHOT_BYTES)
        cached = min(kept // snapshot, _MOST_SNAPSHOTS) if user.prefix_cache else 0
        # Half of the host's memory is for state, at most that of all rows.
        swapped = min(user.host_cache_bytes // 2 // (snapshot + inputs), 2 * user.max_num_seqs)
        pools = RowPools.of(
            user.max_num_seqs,
            min(config.max_prefill_rows, user.max_num_seqs),
            user.block_size,
            ahead=config.row_tokens,
            cached=cached,
            host=swapped,
        )
        total = pools.snapshots * snapshot + pools.inputs * inputs
        cached_bytes = cached * snapshot
        return StatePlan(
            layout, pools, total - cached_bytes, cached_bytes, swapped * (snapshot + inputs)
        )

    def memory(self, config: ResolvedConfig, device: torch.device | None = None) -> StateMemory:
        """Allocate it, on the device of the engine or another one."""
        size = config.user.block_size
        return StateMemory(self.layout, self.pools, size, device or config.device)


_SNAPSHOT_BYTES = 64 << 20
"""Cached snapshots of models whose snapshots are small, such as convolutions."""

_MOST_SNAPSHOTS = 1 << 16


def weight_bytes(plan: ModelPlan, kernels: Kernels, dtype: torch.dtype) -> int:
    """Return the bytes of all parameters as the kernels store them."""
    return sum(parameter_bytes(parameter, kernels, dtype) for parameter in plan.parameters())


def model_footprint(
    model: DecoderConfig,
    config: ResolvedConfig,
    kernels: Kernels,
    groups: tuple[LayerGroup, ...],
    *,
    host_shared: bool,
    drafter: FoundDrafter | None = None,
) -> ModelFootprint:
    """Return every term of the memory plan as a function of blocks and batch tokens.

    `host_shared`: whether host and device share memory, so that the budget covers host terms too.

    Raises:
        ConfigError: `host_cache_bytes` is less than a block and not 0.
    """
    user = config.user

    def buffer_bytes(prefill_tokens: int, row_blocks: int) -> tuple[int, int]:
        fitted = config.fit_to_cache(
            max_model_len=row_blocks * user.block_size, max_batch_tokens=prefill_tokens
        )
        return _buffer_bytes(model, fitted, len(groups))

    layout = user.block_size, config.dtype, _META, config.storage
    block_bytes = Arena(groups, 1, *layout).nbytes
    weights, states_per_token = weight_bytes(plan_of(model), kernels, config.dtype), 0
    if drafter is not None:
        block_bytes += Arena([drafter.layers], 1, *layout).nbytes
        weights += drafter.config.weight_bytes(kernels, config.dtype)
        # Hidden states of layers, and what joins them.
        states_per_token = 2 * len(drafter.config.aux_layers) * model.hidden_size
    if 0 < user.host_cache_bytes < block_bytes:
        raise ConfigError(
            f"host_cache_bytes={user.host_cache_bytes} has no room for a block, which takes"
            f" {block_bytes} bytes: raise it, or set it to 0 for no host cache",
            field="host_cache_bytes",
        )
    states = StatePlan.of(plan_of(model), config)
    host_states = 0 if states is None else states.host_bytes
    on_cpu = config.device.type == "cpu"
    heap = CPU_HEAP_FACTOR if on_cpu else Fraction(1)
    steps = StepSizes.choose(config, kernels).keys()
    plan = plan_of(model)
    layer_weight, head_weight = _unpacked_bytes(plan, kernels, config)
    attends = [op for op in plan.operations if isinstance(op, Attend)]
    activations = math.ceil(heap * _activation_bytes(plan, config, len(groups)))
    logits_per_lane = model.vocab_size * _logit_bytes(config) + _own_logits(plan, config)
    verified = config.most_lanes - user.max_num_seqs
    return ModelFootprint(
        weight_bytes=weights,
        groups=groups,
        block_size=user.block_size,
        block_bytes=block_bytes,
        row_state_bytes=0 if states is None else states.row_bytes,
        snapshot_bytes=0 if states is None else states.snapshot_bytes,
        max_num_seqs=user.max_num_seqs,
        max_model_len=config.max_model_len,
        prefill_chunk=config.prefill_chunk,
        mixed_rows=config.mixed_rows,
        activation_bytes_fixed=(CPU_STEP_BYTES if on_cpu else 0)
        + layer_weight
        # A verify step gathers the blocks of its rows, unless attention is bounded by length.
        + (0 if kernels.bounded_by_length else verified * activations),
        activation_bytes_per_token=activations
        + math.ceil(heap * states_per_token * config.dtype.itemsize),
        read_bytes_per_position=0
        if kernels.bounded_by_length
        else math.ceil(heap * max(_gathered_bytes(op, config) for op in attends)),
        mask_bytes_per_token_position=math.ceil(
            heap * kernels.masks * max(_mask_bytes(op, config) for op in attends)
        ),
        logits_bytes_fixed=(CPU_STEP_BYTES if on_cpu else 0)
        + head_weight
        + _scoring_bytes(model, plan, config)
        + verified * logits_per_lane,
        logits_bytes_per_row=logits_per_lane,
        buffer_bytes=buffer_bytes,
        graph_bytes=sum(1 + key.drafts for key in steps) * GRAPH_BYTES_PER_STEP
        if config.mode == "graph"
        else 0,
        reserve_bytes=RESERVE_BYTES[config.device.type],
        host_blocks=(user.host_cache_bytes - host_states) // block_bytes,
        host_state_bytes=host_states,
        host_shared=host_shared,
    )


def _activation_bytes(plan: ModelPlan, config: ResolvedConfig, num_groups: int) -> int:
    """Peak of the tensors of one token within a layer."""
    size, eager = config.dtype.itemsize, not config.compiled
    most = max(op.live_bytes(plan.hidden_size, size, eager=eager) for op in plan.operations)
    most += size * sum(op.kept_features(plan.hidden_size) for op in plan.operations if op.writes)
    rotation = 2 * 4 * plan.rope_dim
    indices = 8 * (5 + num_groups)
    return most + rotation + indices


def _unpacked_bytes(plan: ModelPlan, kernels: Kernels, config: ResolvedConfig) -> tuple[int, int]:
    """Unpacked weights of the largest linear layer, and of the head, while they run."""
    if kernels.runs_stack(plan):
        return 0, 0  # its linear layers read stored weights directly
    layers = [
        kernels.unpacked_bytes(*parameter.shape)
        for operation in plan.operations
        for parameter in operation.parameters
        if parameter.is_matrix and not isinstance(operation, Experts)
    ]
    if kernels.experts in (reference_experts, opaque_experts):
        layers += [
            converted_bytes(
                operation,
                plan.hidden_size,
                (config.weights.dtype or config.dtype).itemsize,
                quantised=config.weights.dtype is not None,
                on_cpu=config.device.type == "cpu",
            )
            for operation in plan.operations
            if isinstance(operation, Experts)
        ]
    head = plan.head.weight
    return max(layers, default=0), kernels.unpacked_bytes(*head.shape) if head.is_matrix else 0


def _gathered_bytes(attend: Attend, config: ResolvedConfig) -> int:
    """Gathered keys and values of one position in a layer, for kernels that gather them."""
    size = config.dtype.itemsize
    vector, sides = attend.kv_features, attend.sides
    if config.storage == "model":
        gathered = vector * size * (sides + 1)  # each side, and the last before it was masked
    else:
        # As stored, dequantised in float32 without and with its scale, and masked.
        gathered = vector * ((sides - 1) * size + config.kv_element_bytes + 3 * 4)
    if attend.value_dim != attend.head_dim:  # attention with wider keys runs in float32
        gathered += 4 * (vector + attend.kv_heads * attend.value_dim)
    return gathered


def _mask_bytes(attend: Attend, config: ResolvedConfig) -> int:
    """Masks and scores of the reference attention for one token and one position.

    A bool; for every query head of a group a bool and an additive mask; and without fused attention
    in torch (see `Attend.has_plain_softmax`) the scores of every head, three times in float32.
    """
    per_group = attend.heads // attend.kv_heads
    scores = 0 if attend.has_plain_softmax else 3 * 4 * attend.heads
    return 1 + per_group * (1 + config.dtype.itemsize) + scores


def _logit_bytes(config: ResolvedConfig) -> int:
    """Memory of the full sampler for one logit.

    Compiled: the logit itself, in float32, processed, and as a weight. Eager code has a dozen more
    such tensors, three of them at a time while it bisects thresholds. They are large, so the heap
    of a CPU adds less to them than to activations.
    """
    size, eager = config.dtype.itemsize, not config.compiled
    held = size + (44 if eager else 14)
    if config.device.type != "cpu":
        return held
    return 2 * held if eager else held * 3 // 2


def _own_logits(plan: ModelPlan, config: ResolvedConfig) -> int:
    """Logits of a rank's own tokens, in addition to those that it gathers from all ranks."""
    return 0 if plan.shard is None else len(plan.shard.vocab) * config.dtype.itemsize


def _scoring_bytes(model: DecoderConfig, plan: ModelPlan, config: ResolvedConfig) -> int:
    """Memory that scoring of prompt tokens needs in addition to sampling.

    For each logit of a slice: the logit, in float32, and two more such tensors in the log-softmax.
    Captured steps keep the memory of sampling to themselves.
    """
    own = _own_logits(plan, config)
    per_row = model.vocab_size * (config.dtype.itemsize + 12) + own
    scoring = slice_tokens(config.user.max_num_seqs) * per_row
    if config.mode == "graph":
        return scoring
    sampling = model.vocab_size * _logit_bytes(config) + own
    return max(0, scoring - config.user.max_num_seqs * sampling)


def _buffer_bytes(model: DecoderConfig, config: ResolvedConfig, num_groups: int) -> tuple[int, int]:
    """Bytes of the runner on the device: row state, inputs and buffers for scoring; and on the
    host: mirrors of inputs and masks, and copies of outputs. A CPU has none of these."""
    state = DeviceRows.of(config, model, num_groups, _META)
    hidden, scores = PromptScorer.allocate(config.prefill_tokens, model, config.dtype, _META)
    assert scores.packed is not None
    layouts = input_layouts(config, len(state.block_tables), model.hidden_size)
    inputs = sum(allocated_bytes(specs, config.device) for specs in layouts.values())
    device = state.nbytes + inputs + hidden.nbytes + scores.packed.nbytes
    if config.device.type == "cpu":
        return device, 0
    outputs = OUTPUT_SETS * sum(HostOutputs.sizes(config, model.vocab_size).values())
    masks = 0 if state.masks is None else state.masks.bits.nbytes
    return device, inputs + outputs + masks


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes that the process held on the device around a phase of the start."""

    name: str
    before: int
    after: int
    seconds: float


@contextmanager
def logged_phase(phases: list[Phase], name: str, device: torch.device) -> Iterator[None]:
    """Add memory and time of the block to `phases`. On a CPU bytes are the resident set."""
    before, began = resident_bytes(device), time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    phases.append(Phase(name, before, resident_bytes(device), seconds))


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Measured bytes of terms of the plan by name, with notes on the measurement."""

    measured: Mapping[str, int]
    notes: Mapping[str, str] = field(default_factory=dict)


class CapturePeaks:
    """CUDA memory while a library is prepared: peaks of warm-ups, and memory of all captures.

    All steps are warmed up before the first capture, so that a peak is one step's, and later
    decreases of free memory are due to captures.
    """

    def __init__(self, device: torch.device) -> None:
        """Start before the first step is prepared."""
        self._device = device
        self.peaks: dict[StepKey, int] = {}
        self.pool_bytes = 0
        """Bytes of the memory pool of the captures, with the activations of steps."""
        self.captured_bytes = 0
        """Bytes of all captures: their pool and the nodes of their graphs."""
        self._held = self._begin()

    def prepared(self, done: int, total: int, key: StepKey) -> None:
        """Measure after each stage of `StepLibrary.prepare`: first all warm-ups, then captures."""
        if 2 * done <= total:
            self.peaks[key] = self.take()
        if 2 * done == total:
            self._reserved, self._free = self._settled()
        if done == total:
            reserved, free = self._settled()
            self.pool_bytes = max(0, reserved - self._reserved)
            self.captured_bytes = max(0, self._free - free)

    def take(self) -> int:
        """Return the peak since the last call, without what stays allocated (workspaces)."""
        peak, held = torch.cuda.max_memory_allocated(self._device), self._held
        self._held = self._begin()
        return max(0, peak - max(held, self._held))

    def _begin(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(torch.cuda.memory_allocated(self._device))

    def _settled(self) -> tuple[int, int]:
        """Return bytes reserved by torch and free on the device, once it is idle."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(torch.cuda.memory_reserved(self._device)), int(free)


def measure_steps(
    runner: Runner, model: DecoderModel, captured: CapturePeaks | None = None
) -> StepMemory:
    """Measure activations, attention masks and logits of a prepared runner that is idle.

    On a CPU, only the activations that the stack of layers keeps allocated.

    Scoring of prompt tokens counts among the logits. It runs between steps and can use the memory
    of their sampling, unless that is captured. Its kernels are loaded here. Of captured steps,
    `captured` has the peaks.
    """
    notes: dict[str, str] = {}
    measured: dict[str, int] = {}
    if model.kernels.masks:
        notes["attention_masks"] = "not measured: they grow with the width that a step reads"
    else:
        measured["attention_masks"] = 0
    device, sizes = runner.device, runner.sizes
    if device.type != "cuda":
        notes["activations"] = notes["logits"] = "measured on CUDA only"
        if model.stack is not None:
            measured["activations"] = model.stack.workspace_bytes()
            notes["activations"] = "what the layers keep allocated"
        return StepMemory(measured, notes)
    prefill = sizes.key("prefill", sizes.tokens.largest, 1, full_sampler=False)
    decode = sizes.key("decode", sizes.rows.largest, 1, full_sampler=True)

    def peak_of(work: Callable[[], object]) -> int:
        work()  # libraries keep memory of a first run
        watch = CapturePeaks(device)
        work()
        return watch.take()

    for term, key in (("activations", prefill), ("logits", decode)):
        measured[term] = captured.peaks[key] if captured else peak_of(partial(runner.run, key))
    scoring, sampling = peak_of(runner.score_largest_slice), measured["logits"]
    measured["logits"] = scoring + sampling if captured else max(scoring, sampling)
    if captured is not None:
        pool = captured.pool_bytes
        measured["captured_graphs"] = max(0, captured.captured_bytes - pool)
        notes["captured_graphs"] = (
            f"besides a pool of {pool} bytes for activations, logits and masks"
        )
    return StepMemory(measured, notes)
