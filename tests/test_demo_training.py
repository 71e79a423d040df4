"""Repeated text: windows on which the demo model is trained, and prompts that judge it."""

import numpy as np
import pytest
from stepgraph.runtime.demo.drafter_text import DEMO, tokenizer
from stepgraph.runtime.demo.repeated_text import IGNORED, RepeatedText
from stepgraph.runtime.demo.repetition import held_out_repetitions
from stepgraph.runtime.demo.train import Window, encode, mixed, windows


@pytest.fixture(scope="module")
def stream():
    names = ("train.py", "perplexity.py", "repeated_text.py")
    texts = [(DEMO / name).read_text() for name in names]
    return encode(tokenizer(), texts)


@pytest.fixture(scope="module")
def pieces():
    ids = tokenizer()
    return [ids.decode([token]) for token in range(ids.get_vocab_size())]


def test_targets_are_the_next_tokens(stream, pieces):
    source = RepeatedText(stream, pieces, seed=0).windows(512)
    for _ in range(100):
        token_ids, targets = next(source)
        assert token_ids.shape == targets.shape == (512,)
        learnt = targets[:-1] != IGNORED
        assert np.array_equal(targets[:-1][learnt], token_ids[1:][learnt])
        assert learnt.sum() > 200


def test_most_of_a_window_repeats(stream, pieces):
    source = RepeatedText(stream, pieces, seed=0).windows(512)
    known = []
    for _ in range(50):
        ids = next(source).token_ids.tolist()
        earlier = {}
        hits = 0
        for at in range(4, len(ids)):
            key = tuple(ids[at - 4 : at])
            hits += earlier.get(key) == ids[at]
            earlier[key] = ids[at]
        known.append(hits / len(ids))
    assert 0.4 < np.mean(known) < 0.95


def test_changed_repetitions(stream, pieces):
    text = RepeatedText(stream, pieces, seed=0)
    excerpt = stream[20:220]
    renamed = text._renamed(excerpt)
    (changed,) = np.nonzero(renamed != excerpt)
    assert len(changed) > 1
    assert len(set(excerpt[changed].tolist())) == len(set(renamed[changed].tolist())) == 1
    for _ in range(20):
        edited = text._edited(excerpt)
        assert abs(len(edited) - len(excerpt)) < 70
        assert np.array_equal(edited[:1], excerpt[:1])
        assert edited[-1] == excerpt[-1]


def test_windows_are_mixed(stream):
    repeated = iter(lambda: Window(np.zeros(1), np.zeros(1)), None)
    source = mixed(windows(stream, 64, np.random.default_rng(0)), repeated, 0.25,
                   np.random.default_rng(1))  # fmt: skip
    drawn = [next(source) for _ in range(400)]
    assert 60 < sum(len(window.token_ids) == 1 for window in drawn) < 140
    assert {len(window.targets) for window in drawn} == {1, 64}


def test_prompts_begin_to_repeat_an_excerpt():
    for case in held_out_repetitions(64, 2):
        excerpt = case.prompt[1:65]
        assert case.prompt == [0, *excerpt, *excerpt[:16]]
        assert case.expected == (4 * excerpt)[16:216]
