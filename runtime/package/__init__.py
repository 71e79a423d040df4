"""A decoding runtime for PyTorch built for the latency of the next token.

```python
from stepgraph import Engine, EngineConfig, SamplingParams
```

The names come from `stepgraph.runtime`, which is imported with torch when one of them is used
for the first time. `import stepgraph` itself loads neither.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "__version__",
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
    "StepgraphError",
    "CheckpointError",
    "ConfigError",
    "DeadlineUnreachableError",
    "EngineBusyError",
    "EngineClosedError",
    "EngineFailedError",
    "EngineForkedError",
    "EngineNotStartedError",
    "EngineUnavailableError",
    "GrammarError",
    "KernelBuildError",
    "KernelSelfTestError",
    "MemoryBudgetError",
    "NonFiniteLogitsError",
    "OverloadedError",
    "RankError",
    "RequestError",
    "SendTimeoutError",
    "StepPreparationError",
    "StructuredOutputError",
]


def __dir__() -> list[str]:
    """Return the public names with the module's own."""
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from .runtime import *
    from .runtime.errors import *  # type checkers do not follow the `__all__` of the runtime
else:  # a visible __getattr__ would let type checkers accept any name

    def __getattr__(name: str) -> Any:
        """Load a public name from the runtime."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import runtime

        value = globals()[name] = getattr(runtime, name)
        return value
