"""The runtime: requests in, tokens out. Start reading at `request`, then `engine`.

Importing it loads no torch: a public name loads its module when it is first used.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import *  # noqa: F403

if TYPE_CHECKING:
    from .config import EngineConfig, Speculation
    from .engine.engine import Engine
    from .engine.request_output import CompletionOutput, OutputDelta, RequestOutput
    from .loading.chat_template import ChatPrompt
    from .loading.tokenizer import TextTokenizer
    from .prompt_embeds import EmbeddedSpan, EncodedContent, PromptEmbeds
    from .request import TokenLogprobs
    from .sampling_params import SamplingParams
    from .service.async_engine import AsyncEngine
    from .service.consumers import AsyncStream
    from .service.health import Health, ReloadResult
    from .service.request_handle import Delta
    from .service.service_config import ServiceConfig
    from .structured_output import StructuredOutput
else:  # a visible __getattr__ would let type checkers accept any name
    _MODULES = {
        "Engine": "engine.engine",
        "EngineConfig": "config",
        "AsyncEngine": "service.async_engine",
        "AsyncStream": "service.consumers",
        "ServiceConfig": "service.service_config",
        "Delta": "service.request_handle",
        "Health": "service.health",
        "ReloadResult": "service.health",
        "SamplingParams": "sampling_params",
        "Speculation": "config",
        "StructuredOutput": "structured_output",
        "RequestOutput": "engine.request_output",
        "CompletionOutput": "engine.request_output",
        "OutputDelta": "engine.request_output",
        "TokenLogprobs": "request",
        "TextTokenizer": "loading.tokenizer",
        "ChatPrompt": "loading.chat_template",
        "PromptEmbeds": "prompt_embeds",
        "EmbeddedSpan": "prompt_embeds",
        "EncodedContent": "prompt_embeds",
    }

    def __getattr__(name: str) -> Any:
        """Load a public name from its module."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        return value


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
__all__ += [name for name, value in vars(errors).items() if isinstance(value, type)]

logging.getLogger("stepgraph").addHandler(logging.NullHandler())
