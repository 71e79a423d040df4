"""`stepgraph chat` and `run`: the conversation in process, over pipes, and on a pseudo terminal."""

from __future__ import annotations

import io
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stepgraph
from stepgraph.profiling.stats import RequestTiming
from stepgraph.runtime import ConfigError, Engine, SamplingParams
from stepgraph.runtime.tools import chat
from stepgraph.runtime.tools.chat import Session, speed

from ..rigs.engine_rig import greedy, opened
from ..rigs.service_rig import SECONDS

TEMPLATE = """\
{% for m in messages %}# {{ m.role }}: {{ m.content }}
{% endfor %}# answer:{{ "<think>" if "think" in messages[-1].content }}"""
PARAMS = greedy(8)
FLAGS = ("--mode", "eager", "--device", "cpu", "--dtype", "float32", "--temperature", "0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template, whose answers end with their room only."""
    folder = tmp_path_factory.mktemp("chat") / "checkpoint"
    shutil.copytree(Path(stepgraph.runtime.__path__[0]) / "demo", folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with opened(checkpoint, max_model_len=256, dtype="float32") as engine:
        yield engine


def answer(engine: Engine, *said: str, system: str = "") -> str:
    """The answer to the last message of a conversation of user and assistant by turns."""
    roles = ["assistant" if i % 2 else "user" for i in range(len(said))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return engine.chat(messages, PARAMS)[0].text


def test_history_reaches_the_template(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(engine, "demo", PARAMS, system="short")
    said: list[str] = []
    for line in ("def f(", "import os", "class A:"):
        assert session.enter(line)
        said += [line, answer(engine, *said, line, system="short")]
        assert capsys.readouterr().out == f"{said[-1]}\n"
    assert session.enter("/reset")
    assert session.enter("import os")
    assert capsys.readouterr().out == f"{answer(engine, 'import os', system='short')}\n"


def test_refused_messages_leave_the_conversation(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(engine, "demo", PARAMS)
    assert session.enter("def f(")
    for refused in ("word " * 300, "/unknown"):
        assert not session.enter(refused)
    assert session.enter(" ")
    before = capsys.readouterr()
    assert "/reset" in before.err
    first = answer(engine, "def f(")
    assert before.out == f"{first}\n"
    assert session.enter("x")
    assert capsys.readouterr().out == f"{answer(engine, 'def f(', first, 'x')}\n"


def test_an_answer_may_fill_the_context(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(engine, "demo", SamplingParams(temperature=0.0))
    assert session.ask("def f(")
    assert session.enter("/stats")
    *_, stats = capsys.readouterr().err.splitlines()
    tokens, prompt = re.search(r"^(\d+) tokens.* of (\d+) prompt", stats).groups()  # type: ignore[union-attr]
    assert int(tokens) + int(prompt) == engine.max_model_len


def test_a_model_without_a_template_continues_texts(capsys: pytest.CaptureFixture[str]) -> None:
    with opened("demo", dtype="float32") as engine:
        session = Session(engine, "demo", PARAMS)
        said = capsys.readouterr().err
        assert "demo" in said
        assert "template" in said
        for line in ("def main(", "    return"):
            assert session.ask(line)
            assert capsys.readouterr().out == f"{engine.generate(line, PARAMS)[0].text}\n"
        with pytest.raises(ConfigError):
            Session(engine, "demo", PARAMS, system="ignored otherwise")


@pytest.mark.parametrize(
    ("token_ms", "expected"),
    [
        ((30, 40, 60, 90), "4 tokens, 50.0 tokens/s, 20.00 ms/token (p50 20.00)"),
        (range(5, 506, 5), "101 tokens, 200.0 tokens/s, 5.00 ms/token (p50 5.00, p99 5.00)"),
        ((20, 20), "2 tokens, 50.0 tokens/s, 20.00 ms/token (p50 0.00)"),  # one step
        ((25,), "1 tokens, 40.0 tokens/s, 25.00 ms/token (p50 25.00)"),
        ((), "no tokens"),
    ],
)
def test_stats(token_ms: Sequence[int], expected: str) -> None:
    output: Any = SimpleNamespace(
        timing=RequestTiming(0, [ms * 10**6 for ms in token_ms]) if token_ms else None,
        token_ids=list(token_ms),
        cached_tokens=16,
        prompt_token_ids=list(range(20)),
    )
    shown = speed(output)
    assert shown.startswith(f"{expected};")
    assert shown.endswith("; 16 of 20 prompt tokens cached")
    if token_ms:
        assert f"; first token after {token_ms[0]:.1f} ms;" in shown
        assert "), 40% of the memory bandwidth;" in speed(output, 0.4)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "stepgraph", *map(str, arguments), *FLAGS]


def test_a_line_in_an_answer_out(checkpoint: Path, engine: Engine) -> None:
    said = b"def f(\n\n\xff\n/reset\nimport os\n/stats"
    done = subprocess.run(
        command("chat", checkpoint, "--max-tokens", "8"),
        input=said,
        capture_output=True,
        check=False,
        timeout=SECONDS,
    )
    answers = [answer(engine, "def f(")]
    answers += [answer(engine, "def f(", answers[0], "\ufffd"), answer(engine, "import os")]
    assert done.stdout.decode() == "".join(f"{text}\n" for text in answers)
    assert b"tokens/s" in done.stderr
    assert done.returncode == 0, done.stderr


def test_messages_of_several_lines(checkpoint: Path, engine: Engine) -> None:
    """A backslash before the end of a line, and blocks in quotes; the last one has no end."""
    said = ["def f(\n    x", "import os\n\nimport re", "class A:", "/reset\nx = [\\\n"]
    typed = (
        'def f(\\\n    x\n"""import os\n\nimport re\n"""\n"""class A:"""\n"""\n/reset\nx = [\\\n'
    )
    done = subprocess.run(
        command("chat", checkpoint, "--max-tokens", "8"),
        input=typed.encode(),
        capture_output=True,
        check=False,
        timeout=SECONDS,
    )
    spoken: list[str] = []
    for text in (*said[:3], said[3].removesuffix("\n")):
        spoken += [text, answer(engine, *spoken, text)]
    assert done.stdout.decode() == "".join(f"{text}\n" for text in spoken[1::2])
    assert done.returncode == 0, done.stderr


def test_reasoning_is_dimmed_on_a_terminal(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for term, begin, end in (("xterm", "\x1b[2m", "\x1b[22m"), ("dumb", "", "")):
        monkeypatch.setenv("TERM", term)
        assert Session(engine, "demo", PARAMS, interactive=True).ask("think")
        assert capsys.readouterr().out == f"{begin}{answer(engine, 'think')}{end}\n"


def test_run_prints_one_answer(
    checkpoint: Path,
    engine: Engine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = [*FLAGS, "--max-tokens", "8"]
    assert chat.run([str(checkpoint), "def f(", *flags]) == 0
    assert capsys.readouterr().out == f"{answer(engine, 'def f(')}\n"
    text = "def f(\n    x"
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{text}\n"))
    assert chat.run([str(checkpoint), "-", *flags]) == 0
    assert capsys.readouterr().out == f"{answer(engine, text)}\n"
    assert chat.run([str(checkpoint), "-", *flags]) == 1  # no more of it
    assert chat.run([str(checkpoint), "word " * 3000, *flags]) == 1
    assert chat.run(["preset:smollm2-135m", "def f(", *flags, "--max-model-len", "64"]) == 1
    assert chat.run([str(checkpoint / "missing"), "def f(", *flags]) == 1
    assert capsys.readouterr().out == ""


def test_a_closed_pipe_is_no_error(checkpoint: Path) -> None:
    process = subprocess.Popen(
        command("chat", checkpoint),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(b"def f(\n" * 3, timeout=SECONDS)
    assert (process.returncode, b"Traceback" in err) == (0, False), err


@pytest.mark.parametrize(("streams", "status"), [("<&-", 0), (">&-", 0), (">/dev/full", 1)])
def test_streams_that_are_closed_or_full_give_no_traceback(
    checkpoint: Path, streams: str, status: int
) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" --max-tokens 4 {streams}', "sh", *command("chat", checkpoint)],
        input=b"def f(\n",
        capture_output=True,
        check=False,
        timeout=SECONDS,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (status, False), done.stderr
    assert (b"stdout" in done.stderr) is (status == 1)


def test_many_quoted_lines_are_read_in_linear_time(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['"""', *["x" * 80] * 30_000, '"""']
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    before = time.thread_time()
    assert chat.main([str(checkpoint), *FLAGS]) == 1
    assert "max_model_len" in capsys.readouterr().err
    assert time.thread_time() - before < 20  # takes 2 s; 60 s if each line joins the text


ON_TERMINAL = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)  # which becomes the one whose keys send signals
for stream in range(3):
    os.dup2(terminal, stream)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Terminal:
    """A command on a pseudo terminal, in a session of its own."""

    def __init__(self, state: Path, *arguments: str | Path, term: str = "dumb") -> None:
        # The other end stays open: reading fails while no process has it.
        self._keys, self._other_end = os.openpty()
        launcher = [sys.executable, "-c", ON_TERMINAL, os.ttyname(self._other_end)]
        self.process = subprocess.Popen(
            [*launcher, *command(*arguments)],
            env=os.environ | {"TERM": term, "XDG_STATE_HOME": str(state)},
            start_new_session=True,
        )
        self.shown = ""

    def press(self, keys: str) -> None:
        os.write(self._keys, keys.encode())

    def wait_for(self, text: str) -> str:
        """Wait until a text is shown; return what was shown before, since the last one."""
        end = time.monotonic() + SECONDS
        while text not in self.shown:
            readable, _, _ = select.select([self._keys], [], [], max(0, end - time.monotonic()))
            assert readable, f"{text!r} was not shown: {self.shown}"
            self.shown += os.read(self._keys, 1 << 16).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        os.close(self._keys)
        os.close(self._other_end)


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def start(*arguments: str | Path, term: str = "dumb") -> Terminal:
        terminals.append(Terminal(tmp_path, *arguments, term=term))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


def test_ctrl_c_stops_the_answer_and_at_the_prompt_the_program(
    checkpoint: Path, on_terminal: Callable[..., Terminal]
) -> None:
    terminal = on_terminal("chat", checkpoint, "--kernels", "torch")
    terminal.wait_for(">>> ")
    for _ in range(2):
        terminal.press("def f(\r")
        terminal.wait_for("def f(\r\n")
        terminal.wait_for("(")  # of the answer, which goes on for 2,000 tokens
        terminal.press(CTRL_C)
        terminal.wait_for("[stopped]")
        terminal.wait_for(">>> ")
    terminal.press("/stats\r")
    terminal.wait_for("tokens/s")
    terminal.wait_for(">>> ")
    # Python may miss a signal until the end of the line.
    terminal.press(f"{CTRL_C}\r")
    assert terminal.process.wait(SECONDS) == 0


def test_ctrl_d_ends_the_program_and_ctrl_c_one_answer(
    checkpoint: Path, on_terminal: Callable[..., Terminal]
) -> None:
    once = on_terminal("run", checkpoint, "def f(", "--kernels", "torch")
    once.wait_for("(")
    once.press(CTRL_C)
    assert once.process.wait(SECONDS) == 130
    terminal = on_terminal("chat", checkpoint)
    terminal.wait_for(">>> ")
    terminal.press(CTRL_D)
    assert terminal.process.wait(SECONDS) == 0


@pytest.mark.parametrize(
    ("term", "pasted"),
    [("dumb", "import os\rimport re"), ("xterm", "\x1b[200~import os\rimport re\x1b[201~")],
)
def test_pasted_lines_are_one_message(
    checkpoint: Path,
    engine: Engine,
    on_terminal: Callable[..., Terminal],
    tmp_path: Path,
    term: str,
    pasted: str,
) -> None:
    """A later program finds them in its history, which only the user can read."""
    expected = answer(engine, "import os\nimport re").replace("\n", "\r\n")
    flags = ("--max-tokens", "8")
    terminal = on_terminal("chat", checkpoint, *flags, term=term)
    terminal.wait_for(">>> ")
    terminal.press(pasted)
    terminal.wait_for("import re")
    terminal.press("\r")
    terminal.wait_for(expected)
    terminal.wait_for(">>> ")
    terminal.press("def f(\\\r")
    terminal.wait_for("... ")
    # Drops what was typed; as above.
    terminal.press(f"x{CTRL_C}\r")
    terminal.wait_for(">>> ")
    terminal.press("/help\r")
    terminal.wait_for("/reset")
    terminal.wait_for(">>> ")
    terminal.press("/nothing\r")
    terminal.wait_for("unknown command /nothing")
    terminal.wait_for(">>> ")
    terminal.press(CTRL_D)
    assert terminal.process.wait(SECONDS) == 1  # one entry was refused
    path = tmp_path / "stepgraph" / "chat_history"
    assert path.read_text().startswith("import os\nimport re\n")
    assert path.stat().st_mode & 0o77 == 0
    path.write_text("".join(f"line {number}\n" for number in range(2000)))
    later = on_terminal("chat", checkpoint, *flags, term=term)
    later.wait_for(">>> ")
    later.press(UP)
    later.wait_for("line 1999")
    later.press("\r")
    later.wait_for(">>> ")
    later.press(CTRL_D)
    assert later.process.wait(SECONDS) == 0
    assert len(path.read_text().splitlines()) == 1000
