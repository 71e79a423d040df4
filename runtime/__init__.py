"""The runtime: requests in, tokens out. Start reading at `request`, then `engine`."""

import logging

from . import errors
from .config import EngineConfig
from .engine.engine import Engine
from .engine.request_output import CompletionOutput, OutputDelta, RequestOutput
from .errors import *  # noqa: F403
from .loading.chat_template import ChatPrompt
from .loading.tokenizer import TextTokenizer
from .prompt_embeds import EmbeddedSpan, EncodedContent, PromptEmbeds
from .request import TokenLogprobs
from .sampling_params import SamplingParams
from .service.async_engine import AsyncEngine
from .service.health import Health
from .service.reload_result import ReloadResult
from .service.request_handle import Delta
from .service.service_config import ServiceConfig
from .service.streams import AsyncStream
from .speculation.config import Speculation
from .structured_output import StructuredOutput

__all__ = [
    "Engine",
    "EngineConfig",
    "AsyncEngine",
    "AsyncStream",
    "ServiceConfig",
    "Delta",
    "Health",
    "ReloadResult",
    "SamplingParams",
    "Speculation",
    "StructuredOutput",
    "RequestOutput",
    "CompletionOutput",
    "OutputDelta",
    "TokenLogprobs",
    "TextTokenizer",
    "ChatPrompt",
    "PromptEmbeds",
    "EmbeddedSpan",
    "EncodedContent",
]
__all__ += errors.__all__

logging.getLogger("stepgraph").addHandler(logging.NullHandler())
