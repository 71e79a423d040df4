"""`Speculation`: how an engine drafts tokens. Does not import torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ..arguments import Range, check_fields
from ..bounded_repr import bounded_repr
from ..errors import ConfigError

__all__ = ["DRAFTER_METHODS", "HOST_METHODS", "MAX_DRAFTS", "METHODS", "Speculation"]

MAX_DRAFTS = 15
MAX_PATH_CHARS = 4096
HOST_METHODS = ("suffix", "ngram")
DRAFTER_METHODS = ("draft_model", "eagle3", "mtp", "dflash")
METHODS = (*HOST_METHODS, *DRAFTER_METHODS)
_DRAFT_BUCKETS = (1, 2, 3, 4, 7, 15)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """How an engine drafts tokens, for steps that verify several tokens per row.

    Tokens are the same with and without it. See docs/speculation.md.

    Attributes:
        method: the proposer. `suffix`: tokens that followed earlier occurrences of the newest
            tokens in prompt and output, the most frequent ones first. `ngram`: those that followed
            the latest such occurrence. `draft_model`, `eagle3`, `mtp`, `dflash`: those that a
            drafter on the device proposes: a smaller model, an EAGLE-3 head, a module for
            multi-token prediction, or a model that fills a block of tokens at once.
        model: the checkpoint of the drafter: a directory, a hub id, `demo` or `preset:NAME`. None:
            for `mtp` the model's own directory, for other drafters the directory `drafter` in it.
        num_speculative_tokens: maximum drafts of a row and step. The engine chooses fewer,
            or none, by measured acceptance and step times.
        prompt_lookup_min: tokens that an earlier occurrence must share with the newest
            tokens.
        adaptive: whether measured acceptance and step times decide how many drafts are verified.
            False verifies every draft, which can be slower than no drafts at all.
        share_outputs: whether requests also draft from recent outputs of others with the same
            `cache_salt`, where prompt and output have no match or a shorter one. Requests without
            a salt share theirs.

    Raises:
        ConfigError: a value is out of range; it names field, value and range.
    """

    method: Literal["suffix", "ngram", "draft_model", "eagle3", "mtp", "dflash"] = "suffix"
    model: Annotated[str, Range(1, MAX_PATH_CHARS)] | None = None
    num_speculative_tokens: Annotated[int, Range(1, MAX_DRAFTS)] = 7
    prompt_lookup_min: Annotated[int, Range(2, 32)] = 3
    adaptive: bool = True
    share_outputs: bool = False

    def __post_init__(self) -> None:
        check_fields(self, ConfigError, within="speculation")
        if self.model is not None and not self.uses_drafter:
            raise ConfigError(
                f"speculation method {self.method!r} has no model: use one of"
                f" {', '.join(DRAFTER_METHODS)}, or leave model out",
                field="speculation",
            )

    @classmethod
    def of(cls, given: object) -> Speculation:
        """Return the speculation of a method's name, or of a mapping of fields.

        Raises:
            ConfigError: `given` is neither, or has an unknown or invalid field.
        """
        if isinstance(given, Speculation):
            return given
        if isinstance(given, str):
            given = {"method": given}
        if not isinstance(given, Mapping):
            raise ConfigError(
                "speculation must be a method such as 'suffix', a mapping such as"
                " {'method': 'suffix', 'num_speculative_tokens': 7}, a Speculation or None, not"
                f" {bounded_repr(given)}",
                field="speculation",
            )
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ConfigError(
                f"speculation has no field {bounded_repr(unknown[0])}: use {', '.join(names)}",
                field="speculation",
            )
        fields: dict[str, Any] = dict(given)
        if isinstance(fields.get("model"), os.PathLike):
            fields["model"] = os.fspath(fields["model"])
        return cls(**fields)

    @property
    def uses_drafter(self) -> bool:
        """Whether a model on the device proposes the drafts."""
        return self.method in DRAFTER_METHODS

    @property
    def tokens_per_row(self) -> tuple[int, ...]:
        """The numbers of tokens per row that verify steps are prepared for, ascending."""
        most = self.num_speculative_tokens
        return tuple(1 + drafts for drafts in (*(b for b in _DRAFT_BUCKETS if b < most), most))
