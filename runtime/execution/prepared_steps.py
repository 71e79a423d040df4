"""Makes the steps of a runner, which its library compiles and captures at the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...graphs.library import StepLibrary
from ...graphs.steps import (
    CapturedStep,
    CompiledStep,
    CudaGraphCapturer,
    EagerStep,
    GraphCapturer,
    Step,
)
from ..resolved_config import ResolvedConfig
from .step_functions import StepFunctions
from .step_key import StepKey, StepOutput

if TYPE_CHECKING:
    from ..kernels.triton.precompile import CompiledKernels

__all__ = ["PreparedSteps"]


class PreparedSteps:
    """The steps of a mode. Keys without a prepared step run as plain PyTorch."""

    def __init__(
        self,
        config: ResolvedConfig,
        keys: Sequence[StepKey],
        make_functions: Callable[[bool], StepFunctions],
    ) -> None:
        """`make_functions`: returns the step functions of a runner, compiled or eager."""
        self._keys = keys
        self.functions, self._eager = make_functions(config.compiled), make_functions(False)
        self._capturer = CudaGraphCapturer(config.device) if config.mode == "graph" else None
        self.library = _library(config, self.functions, self._eager, self._capturer, keys)

    @property
    def captures(self) -> bool:
        """Whether steps are captured, with memory of their own."""
        return self._capturer is not None

    def compile_kernels(self, *, progress: bool = False) -> CompiledKernels:
        """Compile the Triton kernels of all steps in parallel, before they are prepared."""
        from ..kernels.triton.precompile import (
            compile_kernels,  # imports triton, which CUDA kernels need
        )

        # Several steps per launch use the kernels of one step. The plain PyTorch sampler has no
        # Triton kernels, and run eagerly it exceeds the planned memory of its compiled form.
        native = self._eager.model.kernels.sampler == "triton"
        needed = dict.fromkeys(
            dataclasses.replace(key, steps=1, full_sampler=native and key.full_sampler)
            for key in self._keys
        )
        steps = [(str(key), self._eager.bind(key)) for key in needed]
        if self._capturer is None:
            return compile_kernels(steps, progress=progress)
        # Libraries keep a workspace per stream, so use the stream that captures need anyway.
        compiled: list[CompiledKernels] = []
        self._capturer.warm_up(lambda: compiled.append(compile_kernels(steps, progress=progress)))
        return compiled[0]

    def close(self) -> None:
        """Release all steps and their compiled code."""
        self.library.close()
        self.functions.close()


def _library(
    config: ResolvedConfig,
    functions: StepFunctions,
    eager: StepFunctions,
    capturer: GraphCapturer | None,
    keys: Sequence[StepKey],
) -> StepLibrary[StepKey, StepOutput]:
    """Return the unprepared step library of the mode, which refers to no `PreparedSteps`."""

    def make_step(key: StepKey) -> Step[StepOutput]:
        if config.mode == "eager":
            return EagerStep(eager.bind(key), str(key))
        if capturer is None:
            return CompiledStep(functions.bind(key), str(key))
        return CapturedStep(functions.bind(key), str(key), capturer, identity=key)

    def make_fallback(key: StepKey) -> Step[StepOutput]:
        return EagerStep(eager.bind(key), str(key))

    return StepLibrary(make_step, keys, lambda key: key.size, make_fallback)
