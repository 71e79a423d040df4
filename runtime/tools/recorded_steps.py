"""Records the launches of a model's steps on a GPU, without a GPU and without weights.

The tensors of the model, its cache and its buffers have shapes but no memory (device "meta"). The
steps run in `record_launches`, which records the launches and computes nothing. Needs triton.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from ...cache.arena import Arena
from ..config import EngineConfig
from ..engine.startup import layer_groups
from ..execution.inputs import StepInputs
from ..execution.row_state import RowState
from ..execution.step_functions import StepFunctions, StepKey
from ..kernels import kernels_for, select_kernels
from ..kernels.triton.launch import CAPABILITY, KernelLaunch, record_launches
from ..kernels.triton.paired_layers import every_pair
from ..kernels.triton.tuning import without_library
from ..loading.loader import resolve_source
from ..models.decoder import Decoder
from ..models.layout import fused_layout
from ..models.plan import model_plan
from .kernel_cases import launch_prefill
from .memory_report import resolve_absent

__all__ = ["RecordedStep", "record_layers", "record_steps"]

_META = torch.device("meta")
_BLOCKS = 2
"""Of the cache: no kernel depends on how many there are."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step and what it launches, in order."""

    name: str
    """Its phase, size and sampler, as `decode 8 greedy`."""
    launches: list[KernelLaunch]


def record_steps(
    source: str | Path,
    config: EngineConfig,
    *,
    rows: Sequence[int],
    tokens: Sequence[int],
    capability: int = CAPABILITY,
    library: bool = True,
    pairs: bool = False,
) -> list[RecordedStep]:
    """Record the steps of an engine.

    Args:
        source: as `Engine.from_pretrained`; only the configuration is read.
        config: of the engine; its device and mode are those of a CUDA device that captures graphs.
        rows: sizes of decode steps.
        tokens: sizes of prefill steps.
        capability: compute capability, times ten, of the device that sizes are chosen for.
        library: False: products that would be the library's, which launches nothing here, are
            those of this package's kernels; the names of steps say so.
        pairs: every two products that can be one kernel are one (`kernels/triton/fused_pair.py`);
            the names of steps say so.

    Raises:
        CheckpointError: as `Engine.from_pretrained`.
        ConfigError: the configuration cannot work with this model.
    """
    model = resolve_source(source, config_only=True).config
    config = dataclasses.replace(config, device="cuda", mode="graph")
    resolved = dataclasses.replace(resolve_absent(config, model), max_num_seqs=max(rows))
    groups = layer_groups(model, resolved)
    kernels = select_kernels(
        "cuda", resolved.mode, resolved.dtype, resolved.weights, resolved.kernels
    )
    kernels = kernels_for(kernels, model_plan(model))
    arena = Arena(groups, _BLOCKS, resolved.block_size, resolved.dtype, _META, resolved.storage)
    decoder = Decoder(model, kernels, resolved.dtype, _META, groups, resolved.storage)
    decoder.store(
        (name, torch.empty(fused.shape, dtype=resolved.dtype, device=_META))
        for name, fused in fused_layout(model).items()
    )
    layout = StepInputs.layout(
        max_num_seqs=resolved.max_num_seqs,
        prefill_tokens=max(tokens, default=1),
        prefill_rows=resolved.max_prefill_rows,
        table_updates=1,
    )
    read_blocks = resolved.max_blocks_per_row
    functions = StepFunctions(
        decoder,
        arena.tensor,
        resolved.block_size,
        RowState.allocate(max(rows), len(groups), read_blocks, model.vocab_size, _META),
        StepInputs(
            **{
                name: torch.empty(spec.shape, dtype=spec.dtype, device=_META)
                for name, spec in layout.items()
            }
        ),
        None,
        compiled=False,
    )
    keys = [
        *(StepKey("decode", size, read_blocks, full) for size in rows for full in (False, True)),
        *(StepKey("prefill", size, read_blocks, False) for size in tokens),
    ]
    steps: list[RecordedStep] = []
    for key in keys:
        products = contextlib.nullcontext() if library else without_library()
        paired = every_pair() if pairs else contextlib.nullcontext()
        with products, paired, record_launches(capability) as launches:
            functions.bind(key)()
        sampler = "sampled" if key.full_sampler else "greedy"
        kind = ("" if library else " without library") + (" in pairs" if pairs else "")
        steps.append(RecordedStep(f"{key.phase} {key.size} {sampler}{kind}", launches))
    return steps


def record_layers(
    source: str | Path,
    config: EngineConfig,
    *,
    tokens: Sequence[int],
    capability: int = CAPABILITY,
) -> list[RecordedStep]:
    """Record a layer that runs operation by operation, as `kernel_cases.py` launches it.

    In steps that are recorded these operations are torch's own, which launch nothing on "meta".

    Args:
        source: as for `record_steps`.
        config: likewise.
        tokens: sizes of prefill steps.
        capability: compute capability, times ten, of the device that sizes are chosen for.

    Raises as `record_steps`.
    """
    model = resolve_source(source, config_only=True).config
    resolved = resolve_absent(dataclasses.replace(config, device="cuda", mode="graph"), model)
    steps: list[RecordedStep] = []
    for size in tokens:
        with record_launches(capability) as launches:
            launch_prefill(model, resolved, _META, tokens=size)
        steps.append(RecordedStep(f"layer of {size} tokens", launches))
    return steps
