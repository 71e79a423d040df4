"""A checkpoint's tokenizer: text to token ids, token ids to text, conversations to prompts.

`Engine.tokenizer` is one of these. `text_stream` decodes token ids one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from ..arguments import check_integer, check_type
from ..bounded_repr import bounded_text
from ..errors import CheckpointError, RequestError
from ..prompt_ids import type_name
from .chat_template import ChatPrompt, ChatTemplates, Message, chat_prompts, is_batch
from .checkpoint_files import has_file, read_json_object
from .text_stream import (
    BYTE_OF_CHAR,
    Pieces,
    TextStream,
    is_streamable,
    stages,
    tokenizer_errors,
)
from .vocabulary import VOCABULARY_FILES, read_vocabulary

# Reads `tokenizer_config.json` and chat templates, which `tokenizer.json` does not contain.

SPECIAL_TOKENS = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_USUAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_CONFIG = "tokenizer_config.json"
_MOST_CONFIG_BYTES = 64 << 20
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

    def __post_init__(self) -> None:
        for name, source in self.chat_templates.items():
            if len(source) > _MAX_TEMPLATE_CHARS:
                raise CheckpointError(
                    f"{self.path.parent}: the chat template {name[:80]!r} has {len(source)}"
                    f" characters, more than {_MAX_TEMPLATE_CHARS}"
                )

    @classmethod
    def read(cls, directory: Path, usual: Mapping[str, str]) -> TokenizerConfig:
        """Read the files of a checkpoint directory, all of which may be missing.

        `usual` are the special tokens of a vocabulary, whose texts begin with `bos_token`, unless
        the files name others.

        A template in a separate file replaces those in `tokenizer_config.json`, as in transformers;
        a processor's `chat_template.json` is read if there is no other. Raises `CheckpointError`,
        which names file and key, for what is not a JSON object or a value of a wrong type.
        """
        path, other_path = directory / _CONFIG, directory / "chat_template.json"
        config = _read_object(path)
        named = {**usual, **config}
        if "added_tokens_decoder" not in config:  # the older layout
            named |= _read_object(directory / "special_tokens_map.json")
        special = {key: _token(path, key, named[key]) for key in SPECIAL_TOKENS if named.get(key)}
        added = []
        for key in ("bos_token", "eos_token"):
            flag = config.get(f"add_{key}", (key == "bos_token" and key in usual) or None)
            if not isinstance(flag, bool | None):
                raise CheckpointError(f"{path}: add_{key} must be true or false")
            added.append(special.get(key) if flag else None)
        templates = (
            _template_files(directory)
            or _named_templates(path, config.get("chat_template"))
            or _named_templates(other_path, _read_object(other_path).get("chat_template"))
        )
        return cls(path, special, (added[0], added[1]), templates)


def _read_object(path: Path) -> dict[str, Any]:
    return read_json_object(path, _MOST_CONFIG_BYTES) if has_file(path) else {}


def _token(path: Path, key: str, value: object) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise CheckpointError(f"{path}: {key} must be a string or an object with content")
    return content


def _template_files(directory: Path) -> dict[str, str]:
    paths, templates = {}, {}
    if (directory / "chat_template.jinja").is_file():
        paths["default"] = directory / "chat_template.jinja"
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    for name, path in (paths | {path.stem: path for path in more}).items():
        try:
            templates[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
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


_KEEPING = {"ByteLevel", "Metaspace", "Split", "Punctuation", "Digits", "UnicodeScripts"}
"""Pre-tokenizers that keep all of a text, unless they remove what they split at."""
_MOST_COMPOSED = 4
"""Characters that NFC composes to one, at most."""
_MAX_SHOWN_CHARS = 200


class TextTokenizer:
    """A checkpoint's tokenizer: text to token ids, token ids to text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        templates: ChatTemplates | None = None,
    ) -> None:
        """Take over a tokenizer of the `tokenizers` library, or raise `CheckpointError` if its
        decoder cannot be streamed. Truncation is disabled: a prompt is never cut silently."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        """Tokens that end the output of a request."""
        self._templates = templates or ChatTemplates({}, {})
        decoder = stages(tokenizer.decoder, "decoders")
        if not is_streamable(decoder):
            raise CheckpointError(
                f"its decoder {_shown(decoder)} may change earlier text, so output cannot be"
                " streamed: remove the file to serve requests of token ids"
            )
        self.pieces = Pieces(tokenizer)
        """The bytes that each token adds to a text."""
        self._special_texts: dict[str, list[str]] = {}  # by their first two characters
        for text, token_id in self.added_tokens.items():
            if token_id in self.special_ids and token_id not in self.eos_token_ids:
                self._special_texts.setdefault(text[:2], []).append(text)
        self._longest_token = _longest_token(tokenizer)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of `text`, 0 if there is none.

        Does not tokenise the text: with tokens of at most n characters, m characters are at least
        m / n tokens, for tokenizers that drop and merge none.
        """
        check_type("text", text, str, "a string")
        return len(text) // self._longest_token if self._longest_token else 0

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. A model's vocabulary may be larger."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def id_bound(self) -> int:
        """One more than the largest token id."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def added_tokens(self) -> dict[str, int]:
        """The ids of added tokens, such as `<think>`, by their text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    @property
    def special_ids(self) -> frozenset[int]:
        """The added tokens that `decode` skips with `skip_special_tokens`."""
        return self.pieces.special_ids

    def spells_special(self, source: str) -> bool:
        """Return whether the source of a grammar has the text of a special token that does not end
        the output. Backslashes are ignored, as in the regular expression `<\\|im_start\\|>`."""
        text = source.replace("\\", "")
        return any(
            begin in text and any(special in text for special in specials)
            for begin, specials in self._special_texts.items()
        )

    @property
    def definition(self) -> str:
        """The tokenizer in the format of tokenizer.json."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of `text`.

        With `special`, the checkpoint's post-processor adds its tokens. Raises `RequestError` for
        text that is not valid Unicode or that the tokenizer cannot encode.
        """
        if not isinstance(text, str):
            raise RequestError(f"the text must be a str, not a {type_name(text)}", field="text")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, which the tokenizer cannot take
            raise RequestError(
                f"the text is not valid Unicode: {text[:40]!a}", field="text"
            ) from error
        with tokenizer_errors("encode the text", "text"):
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, or raise `RequestError`; unknown ids have no text."""
        return self.pieces.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def chat_templates(self) -> dict[str, str]:
        """The Jinja sources of the checkpoint's chat templates by name, mostly `default` alone."""
        return dict(self._templates.sources)

    def apply_chat_template(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        chat_template: str | None = None,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> str | list[int] | list[str] | list[list[int]]:
        """Return the prompt of a conversation, or the prompts of a list of conversations.

        Takes the arguments of transformers' method of this name; `chat_template` is the name of one
        of `chat_templates`. Templates write the token that begins a text themselves, so none is
        added: `encode` a text with `special=False`. Raises `RequestError` as `ChatTemplates.render`
        and `encode`.
        """
        prompts = chat_prompts(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
        )
        texts = [self.render(prompt) for prompt in prompts]
        if not tokenize:
            return texts if is_batch(messages) else texts[0]
        token_ids = [self.encode(text, special=False) for text in texts]
        return token_ids if is_batch(messages) else token_ids[0]

    def render(self, prompt: ChatPrompt) -> str:
        """Return the text of a conversation; `RequestError` as `ChatTemplates.render`."""
        return self._templates.render(prompt)

    def with_chat_template(self, path: str) -> TextTokenizer:
        """Return this tokenizer with a file's template as its only one; raises `ConfigError`."""
        changed = copy(self)
        changed._templates = self._templates.replaced_by(path)
        return changed

    def spelling(self, token_id: int) -> str:
        """Return a token as in the vocabulary, quoted, for messages."""
        token_id = check_integer("token_id", token_id, 0, (1 << 32) - 1)
        return _shown(self._tokenizer.id_to_token(token_id))

    def text_stream(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> TextStream:
        """Return the state of a text that continues `prompt_ids`.

        Raises `RequestError` if the tokenizer cannot decode the prompt.
        """
        check_type("prompt_ids", prompt_ids, Sequence, "a sequence of token ids")
        with tokenizer_errors("decode the prompt", "prompt_ids"):
            return TextStream(self.pieces, prompt_ids, skip_special_tokens=skip_special_tokens)


def load_tokenizer(directory: Path, *, eos_token_ids: Sequence[int] = ()) -> TextTokenizer | None:
    """Return the tokenizer of a checkpoint directory, `None` if it has no file of one.

    `add_bos_token` and `add_eos_token` of `tokenizer_config.json` apply if `tokenizer.json` has no
    post-processor that adds tokens. Raises `CheckpointError` for an inconsistent tokenizer and for
    one whose decoder cannot be streamed.
    """
    found = read_tokenizer(directory)
    if found is None:
        return None
    path, tokenizer, usual = found
    try:
        config = TokenizerConfig.read(directory, usual)
        return text_tokenizer(tokenizer, config, eos_token_ids)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def text_tokenizer(
    tokenizer: Tokenizer, config: TokenizerConfig, eos_token_ids: Sequence[int]
) -> TextTokenizer:
    """Return a tokenizer with the settings of its checkpoint; raise `CheckpointError` if they
    contradict it."""
    _add_begin_and_end(tokenizer, config)
    templates = ChatTemplates(config.chat_templates, config.special_tokens)
    return TextTokenizer(tokenizer, eos_token_ids=eos_token_ids, templates=templates)


def read_tokenizer(directory: Path) -> tuple[Path, Tokenizer, dict[str, str]] | None:
    """Return the file of a checkpoint's tokenizer, the tokenizer, and the usual special tokens that
    it has without `tokenizer.json`; None if there is no file.

    Raises `CheckpointError` if the file is not a tokenizer, or of an unsupported one.
    """
    paths = (directory / name for name in ("tokenizer.json", *VOCABULARY_FILES))
    path = next(filter(has_file, paths), None)
    if path is None:
        return None
    try:
        if path.name == "tokenizer.json":
            return path, Tokenizer.from_file(str(path)), {}
        tokenizer = read_vocabulary(path, _read_object(directory / _CONFIG))
    except CheckpointError:
        raise
    except Exception as error:  # `tokenizers` raises bare `Exception`
        raise CheckpointError(f"{path} is not a tokenizer: {bounded_text(error)}") from error
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return path, tokenizer, {name: token for name, token in _USUAL.items() if token in added}


def _longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the characters of the longest token of a byte-level BPE, which loses no text.

    None for other tokenizers, and where added tokens take spaces around them.
    """
    model, added = tokenizer.model, tokenizer.get_added_tokens_decoder().values()
    normalizers = [part["type"] for part in stages(tokenizer.normalizer, "normalizers")]
    splits = stages(tokenizer.pre_tokenizer, "pretokenizers")
    kinds = {part["type"] for part in splits}
    removes = any(part.get("behavior") == "Removed" for part in splits)
    removes |= any(token.lstrip or token.rstrip for token in added)
    if not isinstance(model, models.BPE) or removes or not {"ByteLevel"} <= kinds <= _KEEPING:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if not set(normalizers) <= {"NFC"} or not vocabulary.keys() >= BYTE_OF_CHAR.keys():
        return None
    longest = max(map(len, (*vocabulary, *(token.content for token in added))))
    return longest * (_MOST_COMPOSED if normalizers else 1)


def _add_begin_and_end(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Set the post-processor of `tokenizer_config.json`, if there is no other."""
    kinds = {part["type"] for part in stages(tokenizer.post_processor, "processors")}
    begin, end = config.added_tokens
    if kinds - {"ByteLevel"} or not (begin or end):  # which adds no tokens
        return
    tokens = [token for token in (begin, end) if token]
    ids = {token: tokenizer.token_to_id(token) for token in tokens}
    for token, token_id in ids.items():
        if token_id is None:
            raise CheckpointError(
                f"{config.path} adds {_shown(token)} to every text, which its tokenizer lacks"
            )
    tokenizer.post_processor = TemplateProcessing(
        single=[*([begin] if begin else []), "$A", *([end] if end else [])],
        special_tokens=list(ids.items()),
    )


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return repr(text) if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]!r}..."
