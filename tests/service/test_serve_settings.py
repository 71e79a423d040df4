"""Where flags of `stepgraph serve` come from: command line, environment, configuration file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.service.http.command import make_parser
from stepgraph.runtime.tools.chat import main as chat

WORDS = st.text("abcdefg-/_.", min_size=1, max_size=6).filter(lambda word: word[0] not in "-_")
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "max-num-seqs": st.integers(1, 100),
    "threads": st.integers(-9, -1),
    "stall-seconds": st.floats(0.5, 1e6),
    "prefix-cache": st.booleans(),
    "trace": st.booleans(),
    "dtype": st.sampled_from(["bfloat16", "float32"]),
    "uds": WORDS,
    "api-key": st.lists(WORDS, min_size=1, max_size=3),
    "buckets": st.lists(st.integers(1, 64), min_size=1, max_size=3),
    "tenant-weights": st.dictionaries(WORDS, st.integers(1, 9), min_size=1, max_size=3),
    "speculation": st.sampled_from(
        ["ngram", {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}]
    ),
}
LAYERS = st.fixed_dictionaries({}, optional=VALUES)


def words(name: str, value: Any) -> list[str]:
    """A value as words of a shell."""
    if isinstance(value, dict) and name == "tenant-weights":
        return [f"{key}={number}" for key, number in value.items()]
    if isinstance(value, dict):
        return [json.dumps(value)]
    return [str(each) for each in (value if isinstance(value, list) else [value])]


def on_command_line(flags: dict[str, Any]) -> list[str]:
    found = []
    for name, value in flags.items():
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            found += [f"--{name}", *words(name, value)]
    return found


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "serve.toml"


@settings(max_examples=60, deadline=None)
@given(written=LAYERS, exported=LAYERS, typed=LAYERS, underscores=st.booleans())
def test_settings_of_the_command_line_win_then_variables_then_the_file(
    file: Path,
    written: dict[str, Any],
    exported: dict[str, Any],
    typed: dict[str, Any],
    underscores: bool,
) -> None:
    lines = [f"{name} = {toml(value)}" for name, value in written.items()]
    text = "\n".join(["model = 'demo'", *lines])
    text = text.replace("-num-", "_num_") if underscores else text
    file.write_text(text, encoding="utf-8-sig" if underscores else "utf-8")
    expected = make_parser().parse_args(["demo", *on_command_line(written | exported | typed)])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in exported.items():
            variable = f"STEPGRAPH_{name.replace('-', '_').upper()}"
            patch.setenv(variable, " ".join(words(name, value)))
        patch.setenv("STEPGRAPH_PORT", "")  # as unset
        found = make_parser().parse_args(["--config", str(file), *on_command_line(typed)])
        patch.setenv("STEPGRAPH_CONFIG", str(file))
        patch.setenv("STEPGRAPH_MODEL", "other")
        assert make_parser().parse_args(on_command_line(typed)).model == "other"
    assert vars(found) == vars(expected)


@pytest.mark.parametrize(
    ("text", "variables", "named"),
    [
        ("max-num-seq = 8", {}, ("max-num-seq", "max-num-seqs")),
        ("config = 'x'", {}, ("config",)),
        ("max-num-seqs = 0", {}, ("max-num-seqs", "0")),
        ("max-num-seqs = [1]", {}, ("max-num-seqs", "one value")),
        ("prefix-cache = 'maybe'", {}, ("prefix-cache", "true or false")),
        ("dtype = 'float8'", {}, ("dtype", "float8", "bfloat16")),
        ("allow-origin = []", {}, ("allow-origin", "list")),
        ("dtype = \n", {}, ("serve.toml", "line 1")),
        ("PORTS = 1", {}, ("PORTS", "nearest is port")),
        ("allow-origin = [['x']]", {}, ("allow-origin", "list")),
        ('host = "a\\u0000"', {}, ("host", "NUL")),
        (f"dtype = {'[' * 10_000}", {}, ("serve.toml", "recursion")),
        ("", {"STEPGRAPH_PORT": "x"}, ("STEPGRAPH_PORT", "'x'")),
        ("", {"STEPGRAPH_CONFIG": "missing.toml"}, ("missing.toml",)),
    ],
)
def test_settings_that_are_wrong_are_refused_by_name(
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    variables: dict[str, str],
    named: tuple[str, ...],
) -> None:
    file.write_text(text)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as raised:
        make_parser().parse_args(["demo", *([] if variables else ["--config", str(file)])])
    assert raised.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert all(name in lines[0] for name in named)


def test_variables_that_are_unknown_are_warned_about(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPGRAPH_MAX_NUM_SEQ", "8")
    monkeypatch.setenv("STEPGRAPH_KERNEL_DIR", "kernels")
    make_parser().parse_args(["demo"])
    warning = capsys.readouterr().err
    assert "STEPGRAPH_MAX_NUM_SEQ" in warning
    assert "KERNEL_DIR" not in warning


def test_variables_of_a_kubernetes_service_are_no_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod has them for a Service that is named stepgraph."""
    monkeypatch.setenv("STEPGRAPH_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("STEPGRAPH_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("STEPGRAPH_PORT_80_TCP_ADDR", "10.0.0.1")
    assert make_parser().parse_args(["demo"]).port == 8000
    assert capsys.readouterr().err == ""


def test_chat_reads_a_file_and_no_variables(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPGRAPH_DTYPE", "float8")
    file.write_text("model = 'no/such/model'\nsystem = 'x'")
    assert chat(["--config", str(file)]) == 1
    assert "no/such/model" in capsys.readouterr().err
