"""The runtime: requests in, tokens out. Start reading at `request`, then `engine`."""

import logging

from .config import EngineConfig
from .engine import Engine
from .errors import (
    CheckpointError,
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    EngineFailedError,
    EngineForkedError,
    KernelBuildError,
    KernelSelfTestError,
    MemoryBudgetError,
    RequestError,
    StepgraphError,
    StepPreparationError,
)
from .prompt_embeds import EmbeddedSpan, EncodedContent, PromptEmbeds
from .request import CompletionOutput, RequestOutput, TokenLogprobs
from .sampling_params import SamplingParams

__all__ = [
    "Engine",
    "EngineConfig",
    "SamplingParams",
    "RequestOutput",
    "CompletionOutput",
    "TokenLogprobs",
    "PromptEmbeds",
    "EmbeddedSpan",
    "EncodedContent",
    "StepgraphError",
    "CheckpointError",
    "ConfigError",
    "EngineBusyError",
    "EngineClosedError",
    "EngineFailedError",
    "EngineForkedError",
    "KernelBuildError",
    "KernelSelfTestError",
    "MemoryBudgetError",
    "RequestError",
    "StepPreparationError",
]

logging.getLogger("stepgraph").addHandler(logging.NullHandler())
