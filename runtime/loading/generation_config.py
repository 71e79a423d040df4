"""Reads the sampling defaults of a model from its `generation_config.json`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError, RequestError
from ..sampling_params import NEUTRAL, SamplingDefaults, SamplingParams
from .checkpoint_files import has_file, read_json_object

__all__ = ["GENERATION_FILE", "read_sampling_defaults"]

logger = logging.getLogger("stepgraph.runtime")

GENERATION_FILE = "generation_config.json"
_MOST_BYTES = 4 << 20
_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of the file, and the fields of `SamplingParams` that they set."""


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """Return the defaults of a checkpoint directory; neutral ones without the file.

    `do_sample: false` is temperature 0. Values that `SamplingParams` would refuse are left out,
    with one warning.
    """
    path = directory / GENERATION_FILE
    found: dict[str, Any] = {}
    refused: list[str] = []
    try:
        config = read_json_object(path, _MOST_BYTES) if has_file(path) else {}
    except CheckpointError as error:
        logger.warning("%s: its sampling defaults are not used", error)
        return NEUTRAL
    for key, field in _KEYS.items():
        value = config.get(key)
        if value is None:
            continue
        try:
            found[field] = getattr(SamplingParams(**{field: value}), field)
        except RequestError:
            refused.append(f"{key} = {bounded_repr(value)}")
    do_sample = config.get("do_sample")
    if do_sample is False:
        found["temperature"] = 0.0
    elif not isinstance(do_sample, bool | None):
        refused.append(f"do_sample = {bounded_repr(do_sample)}")
    if refused:
        logger.warning("%s: ignored, since they are not valid: %s", path, ", ".join(refused))
    return SamplingDefaults(**found)
