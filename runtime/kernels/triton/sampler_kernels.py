"""The two Triton kernels of the full sampler; `sampler.py` launches them.

Shapes: B rows of the step, V vocabulary, R rows of the state. A chunk is BLOCK neighbouring tokens,
a run SUB of them; passes over runs take CAP tokens at a time. The last chunk is padded with -inf.

`chunk_statistics` reads every logit once, a program a chunk. `finish_rows` has two programs a row,
one for the token and one for the highest log-probabilities. They read the statistics of each run
and the tokens of those runs only that can matter.

A weight is exp((logit - best) / temperature). Weights of a distribution are at most 1, and the bit
patterns of floats that are not negative are ordered like their values. The threshold of top-k and
top-p is found in three steps, each of which leaves fewer weights to the next: from what is known of
each run (`_lower_bound`), in passes over the runs that reach it, and among at most CAP weights that
stay in registers (`_highest_that_holds`). A pass settles two bits with three tests.

Lane b of a verify step follows the token `inputs[b]`; N lanes belong to a row, the first of which
follows its newest token and the others its drafts. Lanes of padding come last, with another row.
While lanes are drawn, the counts of a row include the tokens before the step only: each lane adds
the drafts that precede it to what it reads. In the end the last lane of the row counts what was
accepted. See `sample_drafted` in `runtime/sampling/`.

In steps without token masks `words_ptr` is None, and in other than verify steps `inputs_ptr` is:
what they need is then not part of the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..ops.batch import NON_FINITE
from .kernel_calls import arrives_last, let_dependents_start, wait_for_inputs

_ONE = tl.constexpr(0x3F800000)  # the bit pattern of 1.0
# The mass of a run in `_lower_bound` is at most this factor too much: sums of 128 weights are exact
# to 1e-6, and their rounding is set against the largest weight, at least 1/128 of them.
_MARGIN = tl.constexpr(1.00025)


@triton.jit
def _forbid(logits, words, token):  # type: ignore[no-untyped-def]
    """The logits of tokens, -inf for those whose bit is not set. NaN and +inf of these become NaN,
    so that they are still detected. `words` holds the word of each token."""
    return tl.where(((words >> (token & 31)) & 1) != 0, logits, logits + float("-inf"))


@triton.jit
def masked_chunk(logits, words_ptr, chunk, token, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits of the BLOCK tokens of a chunk after `_forbid`, and whether the mask forbids any.

    Chunks of at least 32 tokens, or the only one. Where all bits are set, as in lanes without a
    grammar, the words are all that is read.
    """
    WORDS: tl.constexpr = (BLOCK + 31) // 32
    word = chunk * WORDS + tl.arange(0, WORDS)
    words = tl.load(words_ptr + word, mask=word < (V + 31) // 32, other=-1)
    restricted = tl.max((words != -1).to(tl.int32), 0)
    if restricted != 0:
        own = tl.load(words_ptr + (token >> 5), mask=token < V, other=-1)
        logits = _forbid(logits, own, token)
    return logits, restricted


@triton.jit
def _finite_or_zero(x):  # type: ignore[no-untyped-def]
    """`x`, or 0 where subtracting it would make NaN of infinities."""
    return tl.where((x > float("-inf")) & (x < float("inf")), x, 0.0)


@triton.jit
def _weigh(logits, base, divisor):  # type: ignore[no-untyped-def]
    """exp((logits - base) / divisor), and 0 for NaN. The difference comes first: then no
    temperature overflows. The same logit has the same weight wherever it is computed."""
    weights = tl.exp(tl.div_rn(logits - base, tl.zeros_like(logits) + divisor))
    return tl.where(weights == weights, weights, 0.0)


@triton.jit
def _lower_bound(  # type: ignore[no-untyped-def]
    highest, masses, top_k, top_p, V, SUB: tl.constexpr
):  # fmt: skip
    """A bit pattern that the threshold of top-k, or of top-p without it, is not below.

    It is the top_k-th of the largest weights of runs, `highest`. For top-p it is a weight w such
    that runs with some weight from w on hold enough: each at least its largest weight, and at least
    its mass less (SUB - 1) w. Of either the upper 16 bits, within 0.2 % of it.
    """
    by_count = top_k < V
    enough = tl.where(by_count, top_k.to(tl.float32), top_p * tl.sum(masses, 0) * _MARGIN)
    bits = tl.full([], 0, tl.int32)
    for step in range(8):
        shift = 28 - 2 * step
        held = tl.full([], 0, tl.int32)
        for digit in tl.static_range(1, 4):
            w = (bits + (digit << shift)).to(tl.float32, bitcast=True)
            amounts = tl.where(by_count, 1.0, tl.maximum(highest, masses - (SUB - 1) * w))
            amount = tl.sum(tl.where(highest >= w, amounts, 0.0), 0)
            held += (amount >= enough).to(tl.int32)
        bits += held << shift
    return tl.minimum(bits, _ONE)


@triton.jit
def _tile(start, listed, SUB: tl.constexpr, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of the listed runs from `start` on, `[CAP / SUB, SUB]`, 0 after the last one."""
    wanted_ptr, list_ptr, count, base, divisor = listed
    q = start + tl.arange(0, CAP // SUB)
    run = tl.load(list_ptr + q, mask=q < count, other=0)
    token = run[:, None] * SUB + tl.arange(0, SUB)[None, :]
    wanted = tl.load(wanted_ptr + token, mask=(q < count)[:, None], other=float("-inf"))
    return _weigh(wanted, base, divisor)


@triton.jit
def _mass_from(bits, listed, SUB: tl.constexpr, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mass of the weights of listed runs from a bit pattern on, float64."""
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, listed[2], CAP // SUB):
        weights = _tile(start, listed, SUB, CAP)
        mass += tl.sum(tl.where(weights.to(tl.int32, bitcast=True) >= bits, weights, 0.0))
    return mass


@triton.jit
def _keep(  # type: ignore[no-untyped-def]
    threshold, masses_ptr, listed, SUB: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """Write the mass that each listed run has from the threshold on."""
    count = listed[2]
    for start in range(0, count, CAP // SUB):
        weights = _tile(start, listed, SUB, CAP)
        q = start + tl.arange(0, CAP // SUB)
        kept = tl.sum(tl.where(weights >= threshold, weights, 0.0), 1)
        tl.store(masses_ptr + q, kept, mask=q < count)


@triton.jit
def _amounts(weights, BY_COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    if BY_COUNT:
        return tl.full(weights.shape, 1.0, tl.float32)
    else:
        return weights


@triton.jit
def _tests(lo, hi):  # type: ignore[no-untyped-def]
    """Three bit patterns that quarter what is between lo and hi, at least two apart."""
    step = tl.maximum((hi - lo) // 4, 1)
    return lo + step, tl.minimum(lo + 2 * step, hi - 1), tl.minimum(lo + 3 * step, hi - 1)


@triton.jit
def _quarter(held, lo, hi, at_1, at_2, at_3):  # type: ignore[no-untyped-def]
    """Of values at lo, at the tests and at hi those around the last test of `held` that hold."""
    below = tl.where(held == 0, lo, tl.where(held == 1, at_1, tl.where(held == 2, at_2, at_3)))
    above = tl.where(held == 0, at_1, tl.where(held == 1, at_2, tl.where(held == 2, at_3, hi)))
    return below, above


@triton.jit
def _highest_that_holds(  # type: ignore[no-untyped-def]
    lo, goal, found_ptr, listed, BY_COUNT: tl.constexpr, SUB: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """The highest bit pattern from `lo` to 1.0 from which weights hold `goal`, float64: as many, if
    `BY_COUNT`, else a mass. At `lo` they do, and all of them are in listed runs. At
    `found_ptr` there is room for CAP int32."""
    count = listed[2]
    hi = tl.full([], _ONE + 1, tl.int32)
    number_lo = count * SUB
    number_hi = count * 0
    while (number_lo - number_hi > CAP) & (hi - lo > 1):
        c_1, c_2, c_3 = _tests(lo, hi)
        a_1 = tl.full([], 0.0, tl.float64)
        a_2 = tl.full([], 0.0, tl.float64)
        a_3 = tl.full([], 0.0, tl.float64)
        n_1 = count * 0
        n_2 = count * 0
        n_3 = count * 0
        for start in range(0, count, CAP // SUB):
            weights = _tile(start, listed, SUB, CAP)
            bits = weights.to(tl.int32, bitcast=True)
            amounts = _amounts(weights, BY_COUNT)
            a_1 += tl.sum(tl.where(bits >= c_1, amounts, 0.0))
            a_2 += tl.sum(tl.where(bits >= c_2, amounts, 0.0))
            a_3 += tl.sum(tl.where(bits >= c_3, amounts, 0.0))
            n_1 += tl.sum((bits >= c_1).to(tl.int32))
            n_2 += tl.sum((bits >= c_2).to(tl.int32))
            n_3 += tl.sum((bits >= c_3).to(tl.int32))
        held = (a_1 >= goal).to(tl.int32) + (a_2 >= goal).to(tl.int32) + (a_3 >= goal).to(tl.int32)
        lo, hi = _quarter(held, lo, hi, c_1, c_2, c_3)
        number_lo, number_hi = _quarter(held, number_lo, number_hi, n_1, n_2, n_3)

    above = tl.full([], 0.0, tl.float64)  # of the weights that no test is above
    found = count * 0
    tl.debug_barrier()
    for start in range(0, count, CAP // SUB):
        weights = _tile(start, listed, SUB, CAP)
        bits = weights.to(tl.int32, bitcast=True)
        above += tl.sum(tl.where(bits >= hi, _amounts(weights, BY_COUNT), 0.0))
        bits = tl.reshape(bits, [CAP])
        between = ((bits > lo) & (bits < hi)).to(tl.int32)
        at = found + tl.cumsum(between, 0) - 1
        tl.store(found_ptr + at, bits, mask=(between > 0) & (at < CAP))
        found += tl.sum(between, 0)
    tl.debug_barrier()
    i = tl.arange(0, CAP)
    bits = tl.load(found_ptr + i, mask=i < found, other=-1)
    amounts = _amounts(bits.to(tl.float32, bitcast=True), BY_COUNT)
    while hi - lo > 1:
        c_1, c_2, c_3 = _tests(lo, hi)
        a_1 = above + tl.sum(tl.where(bits >= c_1, amounts, 0.0), 0)
        a_2 = above + tl.sum(tl.where(bits >= c_2, amounts, 0.0), 0)
        a_3 = above + tl.sum(tl.where(bits >= c_3, amounts, 0.0), 0)
        held = (a_1 >= goal).to(tl.int32) + (a_2 >= goal).to(tl.int32) + (a_3 >= goal).to(tl.int32)
        lo, hi = _quarter(held, lo, hi, c_1, c_2, c_3)
    return lo


@triton.jit
def _add_drafts(  # type: ignore[no-untyped-def]
    counts, token, start, inputs_ptr, lane, N, BLOCK: tl.constexpr
):  # fmt: skip
    """The counts of the BLOCK tokens from `start` on, with the drafts that precede a lane."""
    step = lane % N
    for number in range(1, step + 1):
        draft = tl.load(inputs_ptr + lane - step + number).to(tl.int32)
        if (draft >= start) & (draft < start + BLOCK):
            counts += (token == draft).to(tl.int32)
    return counts


@triton.jit
def _count_accepted(  # type: ignore[no-untyped-def]
    lane, row, tokens_ptr, rows_ptr, inputs_ptr, counts_ptr, arrived_ptr, N, LANES: tl.constexpr
):  # fmt: skip
    """Count the token of this lane as drawn; the last lane of the row adds the accepted tokens, and
    the one after them, to its counts. At `arrived_ptr` there is a 0 for each row; LANES >= N."""
    first = lane - lane % N
    i = tl.arange(0, LANES)
    of_row = tl.load(rows_ptr + first + i, mask=i < N, other=-1) == row
    if arrives_last(arrived_ptr + lane // N, tl.sum(of_row.to(tl.int32), 0)):
        tokens = tl.load(tokens_ptr + first + i, mask=of_row, other=-1, cache_modifier=".cg")
        drafts = tl.load(inputs_ptr + first + i + 1, mask=of_row & (i + 1 < N), other=-1)
        right = of_row & (tokens == drafts) & (tokens >= 0)
        wrong = tl.min(tl.where(right, LANES, i), 0)
        kept = of_row & (i <= wrong) & (tokens >= 0)
        tl.atomic_add(counts_ptr + tokens, 1, mask=kept, sem="relaxed")


_NUM_REALS = tl.constexpr(6)
_NUM_INTEGERS = tl.constexpr(3)
_BIASES = tl.constexpr(300)
_STOPS = tl.constexpr(32)
_COUNT_MASK = tl.constexpr((1 << 30) - 1)
_NONE = tl.constexpr(-(1 << 63))  # below every key of `_keys`
_LOW_BITS = tl.constexpr((1 << 31) - 1)
_NON_FINITE = tl.constexpr(NON_FINITE)


@triton.jit
def _penalised(reals_ptr):  # type: ignore[no-untyped-def]
    repetition = tl.load(reals_ptr + 3)
    presence = tl.load(reals_ptr + 4)
    frequency = tl.load(reals_ptr + 5)
    return (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)


@triton.jit
def _run_maxima(x, RUNS: tl.constexpr, SUB: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of each run, -inf for NaN, and the largest of all."""
    maxima = tl.max(tl.reshape(tl.where(x == x, x, float("-inf")), [RUNS, SUB]), 1)
    return maxima, tl.max(maxima, 0)


@triton.jit
def chunk_statistics(  # type: ignore[no-untyped-def]
    logits_ptr, reals_ptr, integers_ptr, counts_ptr, rows_ptr, positions_ptr, wanted_ptr,
    raw_maxima_ptr, maxima_ptr, sums_ptr, raw_chunks_ptr, raw_totals_ptr, chunks_ptr, inputs_ptr,
    arrived_ptr, tokens_per_row, words_ptr, mask_rows_ptr, words_stride, restricted_ptr, V,
    logits_stride, advance, BLOCK: tl.constexpr, SUB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the processed logits, and the statistics of each run."""
    b = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    row = tl.load(rows_ptr + b)
    position = tl.load(positions_ptr + b) + advance
    reals_ptr += row * (_NUM_REALS + _BIASES)
    integers_ptr += row * (_NUM_INTEGERS + _BIASES + _STOPS)
    RUNS: tl.constexpr = BLOCK // SUB
    run = (b * chunks + chunk) * RUNS + tl.arange(0, RUNS)
    place = b * chunks + chunk
    wanted_ptr += b * chunks * BLOCK
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = token < V

    raw = tl.load(logits_ptr + b * logits_stride + token, mask=inside, other=float("-inf"))
    raw = raw.to(tl.float32)
    if words_ptr is not None:
        words_ptr += tl.load(mask_rows_ptr + b) * words_stride
        raw, restricted = masked_chunk(raw, words_ptr, chunk, token, V, BLOCK)
        tl.store(restricted_ptr + place, restricted)
    maxima, most = _run_maxima(raw, RUNS, SUB)
    tl.store(raw_maxima_ptr + run, maxima)
    tl.store(raw_chunks_ptr + place, most)
    tl.store(raw_totals_ptr + place, tl.sum(tl.exp(raw - _finite_or_zero(most)), 0))

    wanted = raw
    banned = position < tl.load(integers_ptr + 2)
    if banned | (tl.load(reals_ptr + _NUM_REALS) != 0.0):  # biases that are 0 come last
        tl.store(wanted_ptr + token, wanted)
        tl.debug_barrier()
        entry = tl.arange(0, 512)
        ids = tl.load(integers_ptr + _NUM_INTEGERS + entry, mask=entry < _BIASES + _STOPS, other=-1)
        bias = tl.load(reals_ptr + _NUM_REALS + entry, mask=entry < _BIASES, other=0.0)
        here = (ids >= chunk * BLOCK) & (ids < chunk * BLOCK + BLOCK)
        biased = here & (bias != 0.0)
        before = tl.load(wanted_ptr + ids, mask=biased, other=0.0)
        tl.store(wanted_ptr + ids, before + bias, mask=biased)
        tl.debug_barrier()
        stops = here & (entry >= _BIASES) & banned  # some ids several times: all write the same
        before = tl.load(wanted_ptr + ids, mask=stops, other=0.0)
        tl.store(wanted_ptr + ids, before + float("-inf"), mask=stops)
        tl.debug_barrier()
        wanted = tl.load(wanted_ptr + token)
    if _penalised(reals_ptr):
        counts = tl.load(counts_ptr + row * V + token, mask=inside, other=0)
        if inputs_ptr is not None:
            counts = _add_drafts(counts, token, chunk * BLOCK, inputs_ptr, b, tokens_per_row, BLOCK)
            if (b % tokens_per_row == 0) & (chunk == 0):
                tl.store(arrived_ptr + b // tokens_per_row, 0)
        repetition = tl.zeros_like(wanted) + tl.load(reals_ptr + 3)
        divided = tl.where(wanted > 0, tl.div_rn(wanted, repetition), wanted * repetition)
        wanted = tl.where(counts != 0, divided, wanted)
        outputs = counts & _COUNT_MASK
        wanted -= tl.load(reals_ptr + 4) * (outputs > 0).to(tl.float32)
        wanted -= tl.load(reals_ptr + 5) * outputs.to(tl.float32)
    tl.store(wanted_ptr + token, wanted)

    maxima, most = _run_maxima(wanted, RUNS, SUB)
    temperature = tl.load(reals_ptr)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    weights = _weigh(wanted, _finite_or_zero(most), divisor)
    tl.store(maxima_ptr + run, maxima)
    tl.store(sums_ptr + run, tl.sum(tl.reshape(weights, [RUNS, SUB]), 1))
    tl.store(chunks_ptr + place, most)


@triton.jit
def finish_rows(  # type: ignore[no-untyped-def]
    logits_ptr, reals_ptr, integers_ptr, counts_ptr, rows_ptr, positions_ptr, wanted_ptr,
    raw_maxima_ptr, maxima_ptr, sums_ptr, raw_chunks_ptr, raw_totals_ptr, chunks_ptr, inputs_ptr,
    arrived_ptr, tokens_per_row, words_ptr, mask_rows_ptr, words_stride, restricted_ptr, lists_ptr,
    masses_ptr, found_ptr, tokens_ptr, logprobs_ptr, top_ids_ptr, top_logprobs_ptr, token_ids_ptr,
    state_positions_ptr, V, logits_stride, advance, chunks, null_row, NUM_TOP: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, CHUNKS: tl.constexpr, ALL_RUNS: tl.constexpr,
    CAP: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, 0): the token, drawn, counted and fed back; (row, 1): the top tokens."""
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    runs = chunks * (BLOCK // SUB)
    logits_ptr += b * logits_stride
    raw_maxima_ptr += b * runs
    list_ptr = lists_ptr + (b * 2 + part) * runs

    chunk = tl.arange(0, CHUNKS)
    known = chunk < chunks
    most = tl.load(raw_chunks_ptr + b * chunks + chunk, mask=known, other=float("-inf"))
    totals = tl.load(raw_totals_ptr + b * chunks + chunk, mask=known, other=0.0)
    base = _finite_or_zero(tl.max(most, 0))
    log_mass = base + tl.log(tl.sum(totals * tl.exp(most - base), 0))

    if part == 0:
        row = tl.load(rows_ptr + b)
        position = tl.load(positions_ptr + b) + advance
        reals_ptr += row * (_NUM_REALS + _BIASES)
        integers_ptr += row * (_NUM_INTEGERS + _BIASES + _STOPS)
        token = _token(
            reals_ptr, integers_ptr, position, wanted_ptr + b * chunks * BLOCK,
            maxima_ptr + b * runs, sums_ptr + b * runs, chunks_ptr + b * chunks, list_ptr,
            masses_ptr + b * runs, found_ptr + b * CAP, V, runs, BLOCK, SUB, ALL_RUNS, CAP,
        )  # fmt: skip
        sound = (token >= 0) & (log_mass > float("-inf")) & (log_mass < float("inf"))
        tl.store(tokens_ptr + b, tl.where(sound, token, _NON_FINITE))
        token = tl.where(sound, token, 0)
        tl.store(logprobs_ptr + b, tl.load(logits_ptr + token).to(tl.float32) - log_mass)
        if inputs_ptr is not None:
            if _penalised(reals_ptr):
                _count_accepted(
                    b, row, tokens_ptr, rows_ptr, inputs_ptr, counts_ptr + row * V, arrived_ptr,
                    tokens_per_row, LANES,
                )  # fmt: skip
        elif sound & _penalised(reals_ptr):
            count_ptr = counts_ptr + row * V + token
            tl.store(count_ptr, tl.load(count_ptr) + 1)
        if token_ids_ptr is not None:
            tl.store(token_ids_ptr + row, token)
            tl.store(state_positions_ptr + row, tl.where(row == null_row, 0, position))
    elif NUM_TOP > 0:
        restricted = False
        if words_ptr is not None:
            words_ptr += tl.load(mask_rows_ptr + b) * words_stride
            flags = tl.load(restricted_ptr + b * chunks + chunk, mask=known, other=0)
            restricted = tl.max(flags, 0) != 0
        _top_tokens(
            logits_ptr, words_ptr, restricted, raw_maxima_ptr, list_ptr, top_ids_ptr + b * NUM_TOP,
            top_logprobs_ptr + b * NUM_TOP, log_mass, V, runs, NUM_TOP, SUB, ALL_RUNS, CAP,
        )  # fmt: skip


@triton.jit
def _token(  # type: ignore[no-untyped-def]
    reals_ptr, integers_ptr, position, wanted_ptr, maxima_ptr, sums_ptr, chunks_ptr, list_ptr,
    masses_ptr, found_ptr, V, runs, BLOCK: tl.constexpr, SUB: tl.constexpr,
    ALL_RUNS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The token of a row, int64; `_NON_FINITE` where the largest processed logit is infinite."""
    s = tl.arange(0, ALL_RUNS)
    i = tl.arange(0, SUB)
    maxima = tl.load(maxima_ptr + s, mask=s < runs, other=float("-inf"))
    best = tl.max(maxima, 0)
    temperature = tl.load(reals_ptr)
    if temperature == 0.0:
        first = tl.min(tl.where(maxima == best, s, runs - 1), 0)
        wanted = tl.load(wanted_ptr + first * SUB + i)
        token = first * SUB + tl.min(tl.where(wanted == best, i, SUB - 1), 0)
    else:
        base = _finite_or_zero(best)
        highest = tl.where(s < runs, _weigh(maxima, base, temperature), 0.0)
        chunk_best = tl.load(chunks_ptr + s * SUB // BLOCK, mask=s < runs, other=float("-inf"))
        masses = tl.load(sums_ptr + s, mask=s < runs, other=0.0)
        masses = masses * _weigh(chunk_best, base, temperature)
        threshold = tl.load(reals_ptr + 2)
        top_k = tl.load(integers_ptr)
        top_p = tl.load(reals_ptr + 1)
        listed = False
        if (top_k < V) | (top_p < 1.0) | (threshold > 0.0):
            least = threshold.to(tl.int32, bitcast=True)
            if (top_k < V) | (top_p < 1.0):
                least = _lower_bound(highest, masses, top_k, top_p, V, SUB)
            reaches = (highest.to(tl.int32, bitcast=True) >= least) & (s < runs)
            tl.store(list_ptr + tl.cumsum(reaches.to(tl.int32), 0) - 1, s, mask=reaches)
            count = tl.sum(reaches.to(tl.int32), 0)
            tl.debug_barrier()
            total = tl.sum(masses.to(tl.float64), 0)
            runs_listed = (wanted_ptr, list_ptr, count, base, temperature)
            if top_k < V:
                goal = top_k.to(tl.float64)
                least = _highest_that_holds(least, goal, found_ptr, runs_listed, True, SUB, CAP)
                total = _mass_from(least, runs_listed, SUB, CAP)
            if top_p < 1.0:
                mass = top_p.to(tl.float64) * total
                least = _highest_that_holds(least, mass, found_ptr, runs_listed, False, SUB, CAP)
            threshold = tl.maximum(threshold, least.to(tl.float32, bitcast=True))
            _keep(threshold, masses_ptr, runs_listed, SUB, CAP)
            tl.debug_barrier()
            masses = tl.load(masses_ptr + s, mask=s < count, other=0.0)
            listed = count > 0
        masses = masses.to(tl.float64)
        all_mass = tl.max(tl.cumsum(masses, 0), 0)
        target = _uniform(tl.load(integers_ptr + 1), position) * all_mass
        run, target = _first_above(masses, target, s)
        if listed:
            run = tl.load(list_ptr + run)
        weights = _weigh(tl.load(wanted_ptr + run * SUB + i), base, temperature)
        kept = tl.where(weights >= threshold, weights, 0.0).to(tl.float64)
        within, _ = _first_above(kept, target, i)
        token = run * SUB + within
    finite = (best > float("-inf")) & (best < float("inf"))
    return tl.where(finite, tl.minimum(token, V - 1), _NON_FINITE).to(tl.int64)


@triton.jit
def _first_above(mass, target, index):  # type: ignore[no-untyped-def]
    """The first index with mass whose running sum is above the target, else the last one with mass,
    else 0; and the target less the mass that comes before it."""
    until = tl.cumsum(mass, 0)
    possible = mass > 0.0
    last = tl.max(tl.where(possible, index, 0), 0)
    found = tl.min(tl.where(possible & (until > target), index, last), 0)
    return found, target - tl.sum(tl.where(index == found, until - mass, 0.0), 0)


@triton.jit
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    """`uniform` of `kernels/ops/draws.py` for one seed and position."""
    gamma = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    start = _mix64(seed.to(tl.uint64, bitcast=True) + gamma)
    bits = _mix64(start + position.to(tl.uint64, bitcast=True) * gamma)
    return (bits >> 11).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def _mix64(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _top_tokens(  # type: ignore[no-untyped-def]
    logits_ptr, words_ptr, restricted, maxima_ptr, list_ptr, ids_ptr, logprobs_ptr, log_mass, V,
    runs, NUM_TOP: tl.constexpr, SUB: tl.constexpr, ALL_RUNS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The highest log-probabilities in descending order, of equal ones the lower id first; with
    `words_ptr` and if `restricted`, of the tokens that the mask there allows.

    Runs are dealt out to 128 groups. As many elements as are looked for are at least as large as
    that many of the groups' maxima, so only runs with such an element are entered. Where NaN and
    -inf leave too few, ids that were not found have -inf.
    """
    s = tl.arange(0, ALL_RUNS)
    maxima = tl.load(maxima_ptr + s, mask=s < runs, other=float("-inf"))
    groups = tl.max(tl.reshape(maxima, [ALL_RUNS // 128, 128]), 0)
    g = tl.arange(0, 128)
    greater = groups[:, None] > groups[None, :]
    earlier = (groups[:, None] == groups[None, :]) & (g[:, None] < g[None, :])
    rank = tl.sum((greater | earlier).to(tl.int32), 0)
    level = tl.max(tl.where(rank == NUM_TOP - 1, groups, float("-inf")), 0)
    reaches = (maxima >= level) & (maxima > float("-inf"))
    tl.store(list_ptr + tl.cumsum(reaches.to(tl.int32), 0) - 1, s, mask=reaches)
    count = tl.sum(reaches.to(tl.int32), 0)
    tl.debug_barrier()

    place = tl.arange(0, 32)
    chosen = tl.full([32], -1, tl.int32)
    values = tl.full([32], float("-inf"), tl.float32)
    best = tl.full([], (1 << 63) - 1, tl.int64)
    for at in range(NUM_TOP):
        previous = best
        best = tl.full([], _NONE, tl.int64)
        for start in range(0, count, CAP // SUB):
            q = start + tl.arange(0, CAP // SUB)
            run = tl.load(list_ptr + q, mask=q < count, other=0)
            token = run[:, None] * SUB + tl.arange(0, SUB)[None, :]
            known = (q < count)[:, None] & (token < V)
            logits = tl.load(logits_ptr + token, mask=known, other=float("-inf")).to(tl.float32)
            if words_ptr is not None:
                words = tl.load(words_ptr + (token >> 5), mask=known & restricted, other=-1)
                logits = _forbid(logits, words, token)
            keys = _keys(logits, token)
            best = tl.maximum(best, tl.max(tl.where(keys < previous, keys, _NONE)))
        if best > _NONE:
            chosen = tl.where(place == at, (best & _LOW_BITS).to(tl.int32) ^ _LOW_BITS, chosen)
            values = tl.where(place == at, _ordered((best >> 32).to(tl.int32)), values)
    if best == _NONE:
        _fill(ids_ptr, logprobs_ptr, log_mass, chosen, V, NUM_TOP)
    tl.store(ids_ptr + place, chosen.to(tl.int64), mask=chosen >= 0)
    tl.store(logprobs_ptr + place, values - log_mass, mask=chosen >= 0)


@triton.jit
def _fill(  # type: ignore[no-untyped-def]
    ids_ptr, logprobs_ptr, log_mass, chosen, V, NUM_TOP: tl.constexpr
):  # fmt: skip
    """Write the lowest ids that were not chosen (-1: none) after those that were."""
    token = tl.arange(0, 64)
    taken = tl.max((token[:, None] == chosen[None, :]).to(tl.int32), 1)
    rank = tl.cumsum(1 - taken, 0) - 1 + tl.sum((chosen >= 0).to(tl.int32), 0)
    fits = (taken == 0) & (token < V) & (rank < NUM_TOP)
    tl.store(ids_ptr + rank, token.to(tl.int64), mask=fits)
    tl.store(logprobs_ptr + rank, token * 0.0 + (float("-inf") - log_mass), mask=fits)


@triton.jit
def _keys(logits, token):  # type: ignore[no-untyped-def]
    """int64 in the order of the logits, of equal ones the lower token highest; `_NONE` for NaN and
    -inf. The upper half is the logit's bit pattern, mirrored if it is negative."""
    bits = logits.to(tl.int32, bitcast=True)
    upper = tl.where(bits >= 0, bits, bits ^ _LOW_BITS).to(tl.int64) << 32
    return tl.where(logits > float("-inf"), upper | (token ^ _LOW_BITS).to(tl.int64), _NONE)


@triton.jit
def _ordered(upper):  # type: ignore[no-untyped-def]
    """The logit of the upper half of a key."""
    return tl.where(upper >= 0, upper, upper ^ _LOW_BITS).to(tl.float32, bitcast=True)
