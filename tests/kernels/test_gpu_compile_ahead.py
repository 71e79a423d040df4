"""Every kernel compiles for GPUs that are not here, fits them, and keeps the order rule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED
from stepgraph.runtime.kernels.triton.ptx import PtxSummary, summarize_ptx
from stepgraph.runtime.tools.compile_ahead import (
    SHARED_MEMORY_LIMIT,
    CompileAheadError,
    compile_kernel_calls,
    main,
)

COMMAND = ("-m", "stepgraph.runtime.tools.compile_ahead")
BOTH = ["90", "80"]


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the arguments, with kernels compiled and Triton's cache in `cache`."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything here keeps its compiled kernels."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def examples(triton_cache: Path) -> dict[str, Any]:
    """What is said of the kernels in `compile_ahead_kernels.py`, by capability."""
    done = run(triton_cache, str(Path(__file__).parents[1] / "rigs" / "compile_ahead_kernels.py"))
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def kernels(examples: dict[str, Any], capability: str, name: str) -> list[dict[str, Any]]:
    """Return the calls of a kernel, in order."""
    return [k for k in examples[capability]["kernels"] if k["name"] == name]


@pytest.mark.slow
def test_a_right_kernel_has_no_faults(examples: dict[str, Any]) -> None:
    hopper = kernels(examples, "90", "right")[0]
    assert hopper["faults"] == []
    assert (hopper["waits"], hopper["lets_dependents_start"]) == (1, True)
    assert hopper["early_loads"] == ["w_ptr"]
    assert hopper["stores"] == ["out_ptr"]
    assert hopper["stack"] == hopper["local"] == 0
    assert 8 <= hopper["registers"] <= 64
    assert examples["90"]["machine_code"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("waits_in_a_loop", "waits in a loop"),
        ("writes_early", "writes before it waits"),
        ("may_not_wait", "may skip the wait"),
        ("never_waits", "never waits"),
        ("spills", "spills"),
    ],
)
def test_wrong_kernels_are_found(examples: dict[str, Any], name: str, fault: str) -> None:
    (kernel,) = kernels(examples, "90", name)
    assert any(fault in text for text in kernel["faults"])


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["90", "80"])
def test_partials_are_read_after_their_programs_are_counted(
    examples: dict[str, Any], capability: str
) -> None:
    """Stores, barrier, count, barrier, and then loads that L1 does not serve."""
    store, *rest = examples[capability]["combining"]
    assert store.startswith("st.global")
    count = rest.index("atom.global.gpu.acq_rel.add.u32")
    assert set(rest[:count]) == {"bar.sync"}
    assert rest[count + 1] == "bar.sync"
    loads = [opcode for opcode in rest if opcode.startswith("ld.")]
    assert loads
    assert all(opcode.startswith("ld.global.cg.") for opcode in loads)


@pytest.mark.slow
def test_inputs_loaded_before_the_wait_are_found(examples: dict[str, Any]) -> None:
    found = "right loads w_ptr, which right writes, before it waits"
    assert found in examples["90"]["early_reads"]
    assert examples["80"]["early_reads"] == []


@pytest.mark.slow
def test_bounded_prefetches_have_no_faults(examples: dict[str, Any]) -> None:
    """A request for rows of gate and one for rows of up, before the wait."""
    for kernel in examples["bounded_prefetch"]:
        assert 0 < kernel["constants"]["PREFETCH"] < kernel["constants"]["BLOCK_N"]
        assert (kernel["waits"], kernel["requests"], kernel["faults"]) == (1, 2, [])


@pytest.mark.slow
def test_next_weights_are_requested_without_faults(examples: dict[str, Any]) -> None:
    """Attention without a second weight, or one beyond the budget, knows of none."""
    none, one, two, beyond = examples["weights_ahead"]
    for kernel in (none, one, two, beyond):
        assert (kernel["waits"], kernel["faults"]) == (1, [])
        assert ("second_ptr" in kernel["parameters"]) == (kernel is two)
    assert none["requests"] < one["requests"] < two["requests"]
    assert beyond["requests"] == one["requests"]


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled in this process")
def test_an_interpreting_process_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompileAheadError, match="TRITON_INTERPRET=1"):
        list(compile_kernel_calls([], 90))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "0"), "argument --rows: '0' is not an integer of at least 1"),
        (("--tokens", "many"), "argument --tokens: 'many' is not an integer of at least 1"),
        (("--weight-dtype", "int4"), "argument --weight-dtype: invalid choice: 'int4'"),
        (("--dtype", "half"), "argument --dtype: invalid choice: 'half'"),
        (("--kv-dtype", "int4"), "argument --kv-dtype: invalid choice: 'int4'"),
        (("--speculate", "suffix:x"), "'suffix:x': 'x' is not a number of drafts"),
        (("--max-model-len", "0"), "error: max_model_len must be an integer from 1"),
    ],
)
def test_wrong_command_lines_are_one_clear_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status: object
    try:
        status = main(arguments)
    except SystemExit as left:
        status = left.code
    assert status in (1, 2)
    assert message in capsys.readouterr().err


def check(triton_cache: Path, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Compile the steps of a model; every kernel is without fault."""
    file = tmp_path / "kernels.json"
    done = run(triton_cache, *COMMAND, "--json", str(file), *arguments)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(file.read_text())
    for kernel in document["kernels"]:
        assert kernel["stack"] == kernel["local"] == 0, kernel
        assert kernel["shared"] <= SHARED_MEMORY_LIMIT[kernel["capability"]], kernel
        if "PDL" in kernel["constants"]:
            assert kernel["waits"] == (kernel["capability"] == 90), kernel
        if kernel["waits"] and kernel["name"] == "linear_of_few_rows":
            assert "w_ptr" in kernel["early_loads"], kernel
        assert kernel["faults"] == [], kernel
    return document


@pytest.mark.parametrize(
    ("capabilities", "rows"),
    [(["90"], ["1"]), pytest.param(BOTH, ["1", "8"], marks=pytest.mark.slow)],
)
def test_the_steps_of_the_demo_model(
    triton_cache: Path, tmp_path: Path, capabilities: list[str], rows: list[str]
) -> None:
    settings = ["--capability", *capabilities, "--rows", *rows, "--tokens", "64"]
    document = check(triton_cache, tmp_path, "--model", "demo", *settings)
    assert document["faults"] == []
    names = {kernel["constants"].get("NAME", kernel["name"]) for kernel in document["kernels"]}
    assert {"norm_linear", "gate_up", "residual_linear"} <= names


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "smollm2-135m",
        "llama-3.2-1b",
        "llama-3.1-8b",
        "qwen3-0.6b",
        "mistral-7b",
        "gemma-2-2b",
        "gemma-3-1b",
    ],
)
@pytest.mark.parametrize("weights", ["auto", "int8", "fp8"])
def test_the_steps_of_presets(triton_cache: Path, tmp_path: Path, model: str, weights: str) -> None:
    """With the sizes that they are launched with where nothing was tuned."""
    rows = [str(1 << power) for power in range(9)]
    check(
        triton_cache,
        tmp_path,
        *("--model", f"preset:{model}", "--weight-dtype", weights),
        *("--capability", *BOTH, "--rows", *rows, "--tokens", "16", "512", "2048"),
    )


@pytest.mark.slow
def test_steps_with_a_head_and_masks(triton_cache: Path, tmp_path: Path) -> None:
    document = check(
        triton_cache,
        tmp_path,
        *("--model", "demo", "--rows", "1", "8", "--tokens", "64"),
        *("--speculate", "eagle3:3", "--structured-output"),
    )
    assert document["faults"] == []
    names = {step["name"] for step in document["steps"]}
    assert {"verify 8x4 sampled drafting 3", "verify 8x4 sampled masked"} <= names


@pytest.mark.slow
def test_sampling_with_drafts_and_masks(triton_cache: Path) -> None:
    """Kernels of other steps load nothing for them."""
    done = run(triton_cache, str(Path(__file__).parents[1] / "rigs" / "sampler_kernels_ahead.py"))
    assert done.returncode == 0, done.stderr
    document: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    of_masks, of_drafts = {"words_ptr", "mask_rows_ptr"}, {"inputs_ptr", "arrived_ptr"}
    for name, of_step in document.items():
        for kernel in of_step:
            assert kernel["faults"] == [], (name, kernel)
        loaded = {tensor for kernel in of_step for tensor in kernel["load_bytes"]}
        assert (of_masks <= loaded) == ("masked" in name), name
        assert (of_masks & loaded != set()) == ("masked" in name), name
        assert ("inputs_ptr" in loaded) == ("verify" in name and "sampled" in name), name
        assert (of_drafts & loaded != set()) == ("inputs_ptr" in loaded), name


PTX = """
.version 8.7
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1,
	.param .u64 .ptr .global .align 1 kernel_param_2
)
.reqntid 128
{
	.reg .pred 	%p<2>;
	.loc	1 3 0
$L__func_begin0:
	ld.param.b64 	%rd1, [kernel_param_0]; // a comment; with a semicolon
	ld.param.b64 	%rd2, [kernel_param_2];
	ld.param.b32 	%r1, [kernel_param_1];
	setp.lt.s32 	%p1, %r1, 1;
	{STEPS}
$L__BB0_4:
	ret;
}
"""
WAIT = "griddepcontrol.wait;"
STORE = "@%p1 st.global.v4.b32 [ %rd2 + 0 ], { %r1, %r1, %r1, %r1 };"
ASYNC = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 64 ], 0x10, %r1;"


def summarize(steps: list[str]) -> PtxSummary:
    """Return the summary of a kernel of two pointers, %rd1 and %rd2, that does these steps."""
    return summarize_ptx(PTX.replace("{STEPS}", "\n\t".join(steps)))


@pytest.mark.parametrize(
    ("steps", "faults"),
    [
        ([WAIT, STORE], ()),
        ([STORE, WAIT], ("writes before it waits",)),
        ([WAIT, WAIT], ("waits in 2 places",)),
        (["@%p1 bra $L__BB0_4;", WAIT], ("may skip the wait",)),
        (["@%p1 ret;", WAIT], ("may end without having waited",)),
        (["$L__BB0_2:", WAIT, "@%p1 bra $L__BB0_2;"], ("waits in a loop",)),
        (["$L__BB0_2:", ASYNC, "@%p1 bra $L__BB0_2;", WAIT, STORE], ()),
        (["red.global.add.f32 [%rd2], %r1;", WAIT], ("writes before it waits",)),
    ],
)
def test_order_of_instructions(steps: list[str], faults: tuple[str, ...]) -> None:
    assert summarize(steps).faults == faults


def test_addresses_are_followed_to_their_parameters() -> None:
    steps = [
        ASYNC,
        "mad.wide.s32 %rd5, %r1, 2, %rd1;",
        "{\n.reg .b64 %rd9;\nst.shared.b64 [%r9], %rd5;\n}",
        WAIT,
        "ld.shared.b64 %rd6, [%r9];",
        "@%p1 ld.global.v2.b32 { %r3, %r4 }, [ %rd6 + 16 ];",
        "add.s64 %rd7, %rd2, %r3;",  # an index from memory is not an address
        "atom.global.gpu.acq_rel.add.f32 %r7, [ %rd7 + 0 ], %r3;",
    ]
    summary = summarize(steps)
    assert summary.loads == {0: 16, 2: 0}
    assert summary.early_loads == {0}
    assert summary.stores == {2}
    assert not summary.lets_dependents_start


def test_what_only_prefetches_use_is_no_early_load() -> None:
    hint = [
        "ld.global.b32 %r3, [ %rd1 + 0 ];",
        "mad.wide.s32 %rd5, %r3, 64, %rd2;",
        "@%p1 ld.global.b32 %r4, [ %rd5 + 0 ];",
        "mad.wide.s32 %rd6, %r4, 64, %rd2;",
        "prefetch.global.L2 [%rd6];",
        WAIT,
    ]
    assert summarize(hint).early_loads == set()
    assert summarize(hint).loads == {0: 4, 2: 4}
    assert summarize([*hint, "st.global.b32 [ %rd2 + 0 ], %r3;"]).early_loads == {0}
    assert summarize([*hint, "st.global.b32 [ %rd2 + 0 ], %r4;"]).early_loads == {0, 2}
    assert summarize([*hint, "ld.global.b32 %r5, [ %rd5 + 0 ];"]).early_loads == {0}
    assert summarize([*hint, "setp.lt.s32 %p2, %r4, 1;", "@%p2 bra $L__BB0_4;"]).early_loads


def test_ptx_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        summarize_ptx("// nothing")
