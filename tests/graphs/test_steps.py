"""A step eagerly, compiled, captured: one face, and preparation that fails instead of hiding."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from stepgraph.graphs.compilation import StepCompilationError
from stepgraph.graphs.steps import CudaGraphCapturer, Step, StepPreparationError

from .test_library import PoolCapturer


@pytest.fixture(autouse=True)
def nothing_compiled():
    """torch keeps compiled code with the code object, which all cases of a test share."""
    torch._dynamo.reset()


class Counter:
    """A step's callable that mutates state, as writing keys and values does."""

    def __init__(self, device="cpu"):
        self.runs = 0
        self.x = torch.randn(6, 5, device=device)
        self.state = torch.zeros(5, device=device)

    def __call__(self):
        self.runs += 1
        self.state += 1
        return self.reference()

    def reference(self):
        return (self.x * 3).sum(0) + self.state


def compiled(fn, **options):
    return torch.compile(fn, dynamic=False, backend="eager", **options)


def make(kind, fn):
    if kind == "graph":
        return Step("graph", fn, "demo", PoolCapturer())
    return Step(kind, fn, "demo")


def prepare(step):
    step.warm_up()
    step.record()


@pytest.mark.parametrize("kind", ["eager", "compile", "graph"])
def test_one_face(kind):
    fn = Counter()
    step = make(kind, fn)
    assert (step.kind, step.seconds, step.bytes) == (kind, 0.0, 0)
    prepare(step)
    assert step.seconds > 0
    assert step.bytes == (20 if kind == "graph" else 0)
    for _ in range(3):
        fn.x.copy_(torch.randn(6, 5))
        before = fn.state.clone()
        output = step.run()
        assert torch.equal(fn.state, before + 1)  # a step runs it once
        assert torch.equal(output, fn.reference())


@pytest.mark.parametrize(("kind", "captures"), [("compile", 0), ("graph", 1)])
def test_what_is_compiled_is_run_until_nothing_is(kind, captures):
    """Twice where something was compiled; once where an earlier step had it compiled."""
    fn = Counter()
    part = compiled(lambda x: x * 2)
    for warm_ups in (2, 1):
        before = fn.runs
        prepare(make(kind, lambda: part(fn())))
        assert fn.runs - before == warm_ups + captures


@pytest.mark.parametrize("kind", ["compile", "graph"])
def test_failure_names_step_kind_and_cause(kind):
    def fn():
        raise MemoryError("no room for 7 bytes")

    with pytest.raises(StepPreparationError) as caught:
        prepare(make(kind, fn))
    assert isinstance(caught.value.__cause__, MemoryError)
    assert (caught.value.name, caught.value.kind) == ("demo", kind)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_recompile_limit_that_is_reached_is_no_secret(fullgraph):
    part = compiled(lambda x: x * 5, fullgraph=fullgraph)
    with torch._dynamo.config.patch(recompile_limit=2):
        for n in (1, 2):
            prepare(make("compile", lambda n=n: part(torch.ones(n))))
        with pytest.raises(StepPreparationError) as caught:
            prepare(make("compile", lambda: part(torch.ones(3))))
    assert isinstance(caught.value.__cause__, StepCompilationError) != fullgraph


def test_a_part_that_compiles_on_every_run_is_refused():
    """A host scalar that changes from run to run would compile in the middle of traffic."""
    scale = compiled(lambda x, position: x * position)
    positions = iter(range(2, 1000))
    with pytest.raises(StepPreparationError):
        prepare(make("compile", lambda: scale(torch.ones(3), next(positions))))


def test_other_threads_may_compile_while_a_step_is_prepared():
    """Two runs, and in the midst of each another thread compiles a new shape."""
    own, foreign = compiled(lambda x: x * 7), compiled(lambda x: x * 5)
    foreign(torch.ones(1))
    answers = []

    def fn():
        size = len(answers) + 2
        with ThreadPoolExecutor(1) as other:
            answers.append(other.submit(lambda: foreign(torch.ones(size))).result())
        return own(torch.ones(2))

    prepare(Step("compile", fn, "demo"))
    assert [answer.tolist() for answer in answers] == [[5] * 2, [5] * 3]


class TestCudaGraphs:
    """The real capturer."""

    pytestmark = pytest.mark.gpu

    def test_replays_follow_the_inputs(self):
        fn = Counter("cuda")
        step = Step("graph", fn, "demo", CudaGraphCapturer("cuda"))
        prepare(step)
        assert step.bytes >= 0
        address = step.run().data_ptr()
        for _ in range(50):
            fn.x.copy_(torch.randn(6, 5))
            before = fn.state.clone()
            output = step.run()
            assert output.data_ptr() == address
            assert torch.equal(fn.state, before + 1)
            torch.testing.assert_close(output, fn.reference())
        assert fn.runs == 2  # one to warm up, one recorded; Python sees no replay

    def test_many_sizes_share_one_pool(self):
        """Scratch memory of many sizes takes about what the largest takes, not the sum."""
        capturer = CudaGraphCapturer("cuda")
        steps = {}
        for n in (64, 56, 48, 40, 32, 24, 16, 8):
            x = torch.randn(n, 1 << 18, device="cuda")
            steps[n] = (x, Step("graph", lambda x=x: (x.sin() * 2).sum(-1), f"{n}", capturer))
            prepare(steps[n][1])
        sizes = [step.bytes for _, step in steps.values()]
        assert sum(sizes) <= 1.5 * sizes[0]
        for x, step in steps.values():
            torch.testing.assert_close(step.run(), (x.sin() * 2).sum(-1))

    def test_a_compiled_part_is_captured(self):
        part = torch.compile(lambda x: (x * 3).relu().sum(-1), dynamic=False)
        x = torch.randn(4, 300, device="cuda")
        step = Step("graph", lambda: part(x), "demo", CudaGraphCapturer("cuda"))
        prepare(step)
        x.copy_(torch.randn(4, 300))
        torch.testing.assert_close(step.run(), (x * 3).relu().sum(-1))

    def test_a_failed_capture_says_why_and_leaves_the_thread_as_it_was(self):
        capturer = CudaGraphCapturer("cuda")
        x = torch.randn(5, device="cuda")
        stream = torch.cuda.current_stream()
        with pytest.raises(StepPreparationError):
            prepare(Step("graph", lambda: x.sum().item(), "waits", capturer))
        assert torch.cuda.current_stream() == stream
        assert gc.isenabled()
        step = Step("graph", lambda: x * 2, "demo", CudaGraphCapturer("cuda"))
        prepare(step)
        torch.testing.assert_close(step.run(), x * 2)

    def test_another_thread_may_use_the_device_meanwhile(self):
        stop = threading.Event()

        def work():
            while not stop.is_set():
                torch.ones(1 << 16, device="cuda").sum().item()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            x = torch.randn(9, device="cuda")
            for _ in range(10):
                step = Step("graph", lambda: x * 2, "demo", CudaGraphCapturer("cuda"))
                prepare(step)
                torch.testing.assert_close(step.run(), x * 2)
        finally:
            stop.set()
            thread.join()
