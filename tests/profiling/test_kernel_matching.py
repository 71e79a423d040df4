"""The kernels of a replay and the nodes of a step: right names or none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.profiling.attribution import KernelNames, Node, StepNodes, find_step, match
from stepgraph.profiling.kernel_matching import function_name


def nodes_of(names: list[str | None], tools_ids: list[int | None] | None = None) -> list[Node]:
    """A node each, told apart by their layer."""
    ids = tools_ids or [None] * len(names)
    return [
        Node(layer, f"operation{layer}", "kernel", name, tools_id)
        for layer, (name, tools_id) in enumerate(zip(names, ids, strict=True))
    ]


def layers(matched: list[Node | None]) -> list[int | None]:
    return [None if node is None else node.layer for node in matched]


NAMES = st.lists(st.sampled_from("abc"), max_size=12)


@given(NAMES)
def test_an_equal_sequence_is_named_as_a_whole(names: list[str]) -> None:
    nodes = nodes_of(list(names))
    assert match(nodes, names) == nodes


@given(NAMES, NAMES)
def test_a_node_goes_to_kernels_of_its_name_in_order_and_once(
    names: list[str], kernels: list[str]
) -> None:
    matched = match(nodes_of(list(names)), kernels)
    assert len(matched) == len(kernels)
    found = [node.layer for node in matched if node is not None]
    assert found == sorted(set(found))
    for node, kernel in zip(matched, kernels, strict=True):
        assert node is None or node.kernel == kernel


@given(NAMES.filter(bool), st.data())
def test_a_missing_kernel_never_shifts_names(names: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(names) - 1))
    kept = [index for index in range(len(names)) if index != gone]
    matched = layers(match(nodes_of(list(names)), [names[index] for index in kept]))
    for found, index in zip(matched, kept, strict=True):
        assert found in (None, index)
    # Only a neighbour of the same name makes it uncertain which of them is missing.
    run = {gone}
    for step in (-1, 1):
        index = gone + step
        while 0 <= index < len(names) and names[index] == names[gone]:
            run.add(index)
            index += step
    assert all(found == i for found, i in zip(matched, kept, strict=True) if i not in run)


@given(NAMES, st.data())
def test_an_extra_kernel_has_no_name_and_takes_none(names: list[str], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(names)))
    matched = match(nodes_of(list(names)), [*names[:place], "extra", *names[place:]])
    assert matched[place] is None
    assert layers(matched[:place] + matched[place + 1 :]) == list(range(len(names)))


def test_which_of_two_equal_kernels_is_missing_is_not_guessed() -> None:
    nodes = nodes_of(["norm", "norm", "down"])
    assert layers(match(nodes, ["norm", "down"])) == [None, 2]
    assert layers(match(nodes, ["norm", "norm", "norm", "down"])) == [None, None, None, 2]


def test_a_layer_of_repeated_kernels_is_found_by_its_neighbours() -> None:
    nodes = nodes_of(["a", "b", "c"] * 3)
    kernels = ["a", "b", "c", "b", "c", "a", "b", "c"]  # the second layer lacks its first
    assert layers(match(nodes, kernels)) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_nodes_without_names_are_taken_in_order_where_the_count_is_right() -> None:
    nodes = nodes_of([None, "a", None])
    assert layers(match(nodes, ["x", "a", "y"])) == [0, 1, 2]
    assert layers(match(nodes, [None, None, None])) == [0, 1, 2]
    assert layers(match(nodes, ["x", "b", "y"]))[1] is None
    assert layers(match(nodes_of([None, None]), ["x"])) == [None]


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_ids_of_nodes_win_over_order(order: list[int], unknown: set[int]) -> None:
    nodes = nodes_of(["same"] * 6, [(7 << 32) | index for index in range(6)])
    ids = [None if index in unknown else (7 << 32) | index for index in order]
    matched = layers(match(nodes, ["same"] * 6, ids))
    if len(unknown) == 6:
        assert matched == list(range(6))  # by order, as no id says otherwise
    else:
        assert matched == [None if index in unknown else index for index in order]


def test_an_id_does_not_give_a_name_to_another_function() -> None:
    nodes = nodes_of(["a", "b"], [1, 2])
    assert layers(match(nodes, ["a", "c"], [1, 2])) == [0, None]
    assert layers(match(nodes, ["a", "b"], [9, 8])) == [0, 1]  # ids of another process: by order
    with pytest.raises(ValueError, match="1 tools_ids for 2 kernels"):
        match(nodes, ["a", "b"], [1])


def test_copies_are_no_kernels() -> None:
    nodes = [Node(None, "inputs", "memcpy", None, None), *nodes_of(["a"])]
    assert layers(match(nodes, ["a"])) == [0]


def test_sequences_too_long_to_align_are_matched_only_if_equal() -> None:
    nodes = nodes_of(["a", "b"] * 600)
    assert match(nodes, ["a", "b"] * 600) == nodes
    assert match(nodes, ["b", "a"] * 600) == [None] * 1200


MANGLED = "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfEEEEvT_"
DEMANGLED = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(T3)"


@pytest.mark.parametrize(
    ("name", "base"),
    [
        (MANGLED, "reduce_kernel"),
        (DEMANGLED, "reduce_kernel"),
        ("_Z3fooi", "foo"),
        ("_ZL3foov", "foo"),
        ("_ZN12_GLOBAL__N_13barEv", "bar"),
        ("(anonymous namespace)::bar()", "bar"),
        ("void at::native::<unnamed>::fill<int, 4>(int *, int)", "fill"),
        ("_norm_linear_kernel", "_norm_linear_kernel"),
        ("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", "nvjet_tst_128x8_64x12_4x1_v_bz_TNT"),
        ("_Z", "_Z"),
        ("_ZN99999short", "_ZN99999short"),
        ("", ""),
    ],
)
def test_names_of_functions(name: str, base: str) -> None:
    assert function_name(name) == base


@given(st.text(max_size=30) | st.text("_ZNI0129ELab<>(:) ", max_size=30).map("_Z".__add__))
@settings(max_examples=300)
def test_any_text_is_a_name(name: str) -> None:
    assert bool(function_name(name)) == bool(name)
    assert match(nodes_of([name]), [name]) == nodes_of([name])


def test_a_trace_may_have_mangled_full_or_short_names() -> None:
    nodes = nodes_of([MANGLED, "triton_kernel"])
    for shown in (MANGLED, DEMANGLED, "reduce_kernel"):
        assert layers(match(nodes, [shown, "triton_kernel"])) == [0, 1]
    other = MANGLED.replace("Li512", "Li128")  # the same template, another function
    assert layers(match(nodes, [other, "triton_kernel"])) == [None, 1]


def step(size: int, names: list[str], *, full: bool = False) -> StepNodes:
    return StepNodes("decode", size, 4, full, 1, tuple(nodes_of(list(names))))


def test_the_step_of_a_replay_is_the_one_that_explains_most_of_it() -> None:
    greedy, sampled = step(2, ["a", "b", "pick"]), step(2, ["a", "b", "sort", "draw"], full=True)
    names = KernelNames(steps=[step(1, ["a"]), sampled, greedy, step(2, ["a", "b", "pick"])])
    found = find_step(names, "decode", 2, ["a", "b", "pick"])
    assert found is not None
    assert (found[0] is greedy, layers(found[1])) == (True, [0, 1, 2])
    found = find_step(names, "decode", None, ["a", "b", "sort", "draw"])
    assert found is not None
    assert found[0] is sampled
    assert find_step(names, "prefill", None, ["a"]) is None
    assert find_step(names, "decode", 8, ["a"]) is None
    assert find_step(names, "decode", 2, ["z"]) is None
