"""The form of an output whose prompt ends within the reasoning: its end, then what is demanded."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ...structured_output import GrammarKind, StructuredOutput
from .text_parsers import CLOSE

__all__ = ["ReasonedOutput", "spells_end_of_reasoning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonedOutput(StructuredOutput):
    """Any text up to `</think>`, white space, and `content`."""

    content: StructuredOutput | None = None

    @property
    def kind(self) -> GrammarKind:
        """A kind of its own, which users cannot ask for."""
        return "reasoned"

    @property
    def source(self) -> str:
        """The tag, and the kind and the source of the content, in JSON."""
        assert self.content is not None
        return json.dumps([CLOSE, self.content.kind, self.content.source], ensure_ascii=False)


def spells_end_of_reasoning(structured: StructuredOutput) -> bool:
    """Return whether a grammar is one of the whole output, with the end of the reasoning."""
    return structured.kind != "json" and CLOSE in structured.source.replace("\\", "")
