"""Reads `tokenizer_config.json` and chat templates, which `tokenizer.json` does not contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .checkpoint_files import has_file, read_json_object

__all__ = ["TokenizerConfig"]

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_CONFIG_FILE = "tokenizer_config.json"
_MOST_CONFIG_BYTES = 64 << 20
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_JSON_FILE = "chat_template.json"
_MORE_TEMPLATES = "additional_chat_templates"
_MAX_TEMPLATE_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The settings of a checkpoint's `tokenizer_config.json` and related files."""

    path: Path
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token` and so on, if given."""
    added_tokens: tuple[str | None, str | None]
    """The tokens that `add_bos_token` and `add_eos_token` add to a text's begin and end."""
    chat_templates: Mapping[str, str]
    """Jinja sources by name; the one without a name is `default`."""

    @classmethod
    def read(cls, directory: Path) -> TokenizerConfig:
        """Read the files of a checkpoint directory, all of which may be missing.

        A template in a separate file replaces those in `tokenizer_config.json`, as in transformers;
        `chat_template.json` of processors is read if there is no other.

        Raises:
            CheckpointError: a file is not a JSON object, or a value has a wrong type; it names the
                file and the key.
        """
        path = directory / _CONFIG_FILE
        config = _read_object(path)
        named = dict(config)
        if "added_tokens_decoder" not in config:  # the older layout
            named |= _read_object(directory / _SPECIAL_TOKENS_FILE)
        special = {key: _token(path, key, named[key]) for key in SPECIAL_TOKENS if named.get(key)}
        added = []
        for key in ("bos_token", "eos_token"):
            flag = config.get(f"add_{key}")
            if not isinstance(flag, bool | None):
                raise CheckpointError(f"{path}: add_{key} must be true or false")
            added.append(special.get(key) if flag else None)
        templates = (
            _template_files(directory)
            or _named_templates(path, config.get("chat_template"))
            or _named_templates(
                directory / _TEMPLATE_JSON_FILE,
                _read_object(directory / _TEMPLATE_JSON_FILE).get("chat_template"),
            )
        )
        for name, source in templates.items():
            if len(source) > _MAX_TEMPLATE_CHARS:
                raise CheckpointError(
                    f"{directory}: the chat template {name[:80]!r} has {len(source)} characters,"
                    f" more than {_MAX_TEMPLATE_CHARS}"
                )
        return cls(path, special, (added[0], added[1]), templates)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    return read_json_object(path, _MOST_CONFIG_BYTES) if has_file(path) else {}


def _token(path: Path, key: str, value: object) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise CheckpointError(f"{path}: {key} must be a string or an object with content")
    return content


def _template_files(directory: Path) -> dict[str, str]:
    templates = {}
    if (directory / _TEMPLATE_FILE).is_file():
        templates["default"] = _read_text(directory / _TEMPLATE_FILE)
    for path in sorted((directory / _MORE_TEMPLATES).glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def _named_templates(path: Path, value: object) -> dict[str, str]:
    """Return the templates of a `chat_template` key: a source, or a list (or object) of them."""
    if value is None:
        return {}
    entries = value
    if isinstance(value, str):
        entries = {"default": value}
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        entries = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(entries, dict) or not all(
        isinstance(text, str) for entry in entries.items() for text in entry
    ):
        raise CheckpointError(
            f"{path}: chat_template must be a string, or a list of objects with name and template"
        )
    return entries
