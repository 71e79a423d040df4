"""The flags of a profile: what they default to, and what they refuse, each in one line."""

from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.bench.options import parse_arguments
from stepgraph.runtime.bench.profile import StepWindow
from stepgraph.runtime.bench.profile_options import StepRange


def test_a_profile_is_of_one_case():
    options = parse_arguments(["--profile", "torch"])
    assert (options.batch_size, options.input_len, options.output_len) == ([1], [1024], [64])
    assert (options.num_warmup, options.num_iters) == (1, 1)
    assert options.profile_steps == StepRange(15, 31)
    assert str(options.profile_output) == "stepgraph-profile"


def test_without_a_profile_nothing_is_different():
    options = parse_arguments([])
    assert options.profile == "none"
    assert (options.batch_size, options.num_iters) == ([1, 8], 3)
    assert parse_arguments(["--profile", "none"]).num_iters == 3


@given(st.integers(1, 10_000))
def test_default_steps_lie_within_the_run(steps):
    window = StepRange.of_run(steps)
    assert 0 <= window.first < window.end <= steps
    assert window.end - window.first <= 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--profile torch --profile-steps 60:80", "60:80 is outside of the run: with --output-len"),
        ("--profile torch --profile-steps 0:9 --output-len 8", "it has 7 steps"),
        ("--profile torch --profile-steps 9:9", "'9:9' has no steps: B must be larger than A"),
        ("--profile torch --profile-steps a:b", "'a:b' is not of the form A:B"),
        ("--profile torch --profile-steps :5", "':5' is not of the form A:B"),
        (
            "--profile torch --graph-trace node",
            "--graph-trace has no effect without --profile nsys",
        ),
        ("--graph-trace node", "--graph-trace has no effect without --profile"),
        ("--profile-steps 1:2", "--profile-steps has no effect without --profile"),
        ("--profile none --profile-output x", "--profile-output has no effect without --profile"),
        ("--profile torch --batch-size 1 8", "one case: --batch-size has 2 values (1 8)"),
        ("--profile torch --mode eager compile", "one case: --mode has 2 values"),
        ("--profile torch --num-iters 2", "a profile is of one repetition: --num-iters is 2"),
        ("--profile torch --steps-per-launch 4", "--steps-per-launch is 4, it must be 1"),
        ("--profile torch --baseline transformers", "--baseline cannot go with --profile"),
        ("--profile torch --compare old.json", "--compare cannot go with --profile"),
        pytest.param(
            "--profile torch --plot a.png",
            "--plot cannot go with --profile: a profiled run is",
            marks=pytest.mark.skipif(
                find_spec("matplotlib") is None, reason="needs the package matplotlib"
            ),
        ),
        ("--profile torch --scenario churn", "--profile: no effect together with --scenario churn"),
        ("--profile nsys --explain-memory", "--profile: no effect together with --explain-memory"),
        ("--profile torch --profile-output nowhere/x", "nowhere is not a directory"),
        ("--profile torch --profile-output folder/", "'folder/' names no file"),
        ("--profile nsys --profile-output .", "'.' names no file"),
        ("--profile torch --profile-output taken", "taken.trace.json.gz: it is a directory"),
        ("--profile nsys --profile-output taken", "taken.kernels.json: it is a directory"),
    ],
)
def test_wrong_flags_are_one_clear_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.trace.json.gz").mkdir()
    (tmp_path / "taken.kernels.json").mkdir()
    monkeypatch.setattr("sys.argv", ["bench.py"])
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(arguments.split())
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench.py: error: ")
    assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "taken.kernels.json",
        "taken.trace.json.gz",
    ]


class Context:
    """Notes when it is entered and left."""

    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("open")

    def __exit__(self, kind, error, traceback):
        self.log.append("closed" if kind is None else kind.__name__)


@given(first=st.integers(0, 8), length=st.integers(1, 8), more=st.integers(0, 4))
def test_a_window_holds_its_steps_and_no_other(first, length, more):
    log = []
    with StepWindow(StepRange(first, first + length), lambda: Context(log)) as window:
        for step in range(first + length + more):
            window.before_step(step)
            log.append(step)
        window.before_step(first + length + more)
    steps = range(first + length + more)
    end = first + length
    assert log == [*steps[:first], "open", *steps[first:end], "closed", *steps[end:]]


def test_a_window_closes_where_the_run_ends_with_an_error():
    log = []

    def run():
        with StepWindow(StepRange(0, 5), lambda: Context(log)) as window:
            window.before_step(0)
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert log == ["open", "KeyError"]
