"""The runtime: requests in, tokens out. Start reading at `request`, then `engine`."""

import logging

from .config import EngineConfig
from .engine.engine import Engine
from .engine.request_output import CompletionOutput, OutputDelta, RequestOutput
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
    NonFiniteLogitsError,
    RequestError,
    StepgraphError,
    StepPreparationError,
)
from .loading.chat_template import ChatPrompt
from .loading.tokenizer import TextTokenizer
from .prompt_embeds import EmbeddedSpan, EncodedContent, PromptEmbeds
from .request import TokenLogprobs
from .sampling_params import SamplingParams

__all__ = [
    "Engine",
    "EngineConfig",
    "SamplingParams",
    "RequestOutput",
    "CompletionOutput",
    "OutputDelta",
    "TokenLogprobs",
    "TextTokenizer",
    "ChatPrompt",
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
    "NonFiniteLogitsError",
    "RequestError",
    "StepPreparationError",
]

logging.getLogger("stepgraph").addHandler(logging.NullHandler())
