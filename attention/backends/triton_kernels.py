"""Decode of folded query rows in Triton: partial results of spans of keys, then their sum. Imported only where it is used.

Query rows of one request that share a KV head are one tile: slots and heads are folded, so a tile of keys is loaded once for
all of them, and for latent rows once for scores and values both. Without a causal mask all rows end at the same key, so
there is nothing else to fold.

Shape symbols: B requests, G KV heads, M folded rows (query slots * heads per KV head), D key dim, V value dim, Z splits.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_split(
    query,  # [B, G, M, D]
    pool,
    page_table,
    seq_lens,
    partial,  # [B, G, M, Z, V] float32
    partial_lse,  # [B, G, M, Z] float32, base 2
    scale_log2,
    num_rows,
    num_splits,
    visible_rows,
    table_stride,
    page_stride,
    row_stride,
    value_offset,
    PAGE_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    IS_LATENT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One span of keys for one tile of folded rows. A key is V numbers and a tail; latent rows take the V as value."""
    request = tl.program_id(0)
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    group = tl.program_id(1) // num_tiles
    split = tl.program_id(2)
    m = (tl.program_id(1) % num_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, VALUE_BLOCK)
    is_query = m < num_rows
    is_dim = d < VALUE_DIM

    query_rows = ((request * NUM_GROUPS + group).to(tl.int64) * num_rows + m) * KEY_DIM
    head = tl.load(query + query_rows[:, None] + d[None, :], mask=is_query[:, None] & is_dim[None, :], other=0.0)
    if TAIL_DIM:
        t = tl.arange(0, TAIL_BLOCK)
        is_tail = t < TAIL_DIM
        tail = tl.load(
            query + query_rows[:, None] + VALUE_DIM + t[None, :], mask=is_query[:, None] & is_tail[None, :], other=0.0
        )

    length = tl.load(seq_lens + request)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(length - visible_rows, 0)
    span = tl.cdiv(tl.cdiv(length - start, num_splits), BLOCK_N) * BLOCK_N
    first = start + split * span
    end = tl.minimum(first + span, length)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    for tile in range(first, end, BLOCK_N):
        n = tile + tl.arange(0, BLOCK_N)
        is_row = n < end
        page = tl.load(page_table + request.to(tl.int64) * table_stride + n // PAGE_SIZE, mask=is_row, other=0)
        rows = page.to(tl.int64) * page_stride + (n % PAGE_SIZE) * row_stride + group * KEY_DIM
        # Masked loads are zeros, never what lies there: NaN times a weight of 0 is NaN.
        is_key = is_row[:, None] & is_dim[None, :]
        key = tl.load(pool + rows[:, None] + d[None, :], mask=is_key, other=0.0).to(query.dtype.element_ty)
        scores = tl.dot(head, tl.trans(key), input_precision="ieee")
        if TAIL_DIM:
            key_tail = tl.load(
                pool + rows[:, None] + VALUE_DIM + t[None, :], mask=is_row[:, None] & is_tail[None, :], other=0.0
            ).to(query.dtype.element_ty)
            scores = tl.dot(tail, tl.trans(key_tail), acc=scores, input_precision="ieee")
        scores = tl.where(is_row[None, :], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        if IS_LATENT:
            value = key
        else:
            value = tl.load(pool + rows[:, None] + value_offset + d[None, :], mask=is_key, other=0.0).to(query.dtype.element_ty)
        mixed = tl.dot(weights.to(value.dtype), value, acc=mixed * shrink[:, None], input_precision="ieee")
        top = new_top

    # A span without keys has weight 0: no value, and a log-sum-exp of -inf.
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    lse = tl.where(is_empty, float("-inf"), top + tl.log2(tl.where(is_empty, 1.0, total)))
    out_rows = ((request * NUM_GROUPS + group).to(tl.int64) * num_rows + m) * num_splits + split
    tl.store(partial_lse + out_rows, lse, mask=is_query)
    tl.store(partial + out_rows[:, None] * VALUE_DIM + d[None, :], mixed, mask=is_query[:, None] & is_dim[None, :])


@triton.jit
def reduce_splits(
    partial,  # [R, Z, V] float32
    partial_lse,  # [R, Z] float32, base 2
    output,  # [R, V]
    lse,  # [R] float32, base 2
    value_scale,
    num_splits,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """Sum the spans of one folded row, each by its share of the exponential sum."""
    row = tl.program_id(0).to(tl.int64)
    z = tl.arange(0, SPLIT_BLOCK)
    d = tl.arange(0, VALUE_BLOCK)
    is_dim = d < VALUE_DIM
    span_lse = tl.load(partial_lse + row * num_splits + z, mask=z < num_splits, other=float("-inf"))
    top = tl.max(span_lse, axis=0)
    # A row without any key has shares of 0 and not of NaN.
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(span_lse - anchor), axis=0)
    mixed = tl.zeros([VALUE_BLOCK], tl.float32)
    for split in range(num_splits):
        share = tl.exp2(tl.load(partial_lse + row * num_splits + split) - anchor)
        mixed += share * tl.load(partial + (row * num_splits + split) * VALUE_DIM + d, mask=is_dim, other=0.0)
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total) * value_scale
    tl.store(output + row * VALUE_DIM + d, mixed.to(output.dtype.element_ty), mask=is_dim)
    tl.store(lse + row, tl.where(is_empty, float("-inf"), top + tl.log2(tl.where(is_empty, 1.0, total))))
