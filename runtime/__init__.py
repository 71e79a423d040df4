"""The runtime: requests in, tokens out. Start reading at `request`, then `engine`."""

import logging

from .chat_template import ChatPrompt
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
    NonFiniteLogitsError,
    RequestError,
    StepgraphError,
    StepPreparationError,
)
from .prompt_embeds import EmbeddedSpan, EncodedContent, PromptEmbeds
from .request import TokenLogprobs
from .request_output import CompletionOutput, OutputDelta, RequestOutput
from .sampling_params import SamplingParams
from .tokenizer import TextTokenizer

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
