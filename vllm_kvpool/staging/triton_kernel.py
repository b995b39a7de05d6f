"""The Triton kernel that moves fragments of cells between pages and a buffer on a GPU."""

from typing import Any

import triton
import triton.language as tl

from vllm_kvpool.staging.triton_tables import FRAGMENT_ENTRIES, NUM_COLUMNS, RunTable

NUM_WARPS = 4

# The kernel knows addresses and strides, not formats, and works on machine words whatever the
# dtype. One program moves one tile: `TILE_TOKENS` tokens by `TILE_WORDS` words of a run of one head
# and layer of one fragment. Its input is one int64 table: rows of runs, rows of fragments, block
# ids. Programs of the same tile of different fragments are neighbours, since fragments are mostly
# the heads of the same tokens, which lie side by side in token-major pages.

# Columns of a run. Strides, sizes and offsets in words, the base address in bytes.
BASE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, ELEM_STRIDE = map(tl.constexpr, range(5))
ELEM_WORDS, NUM_WORDS, ROW_OFFSET, ROW_WORDS = map(tl.constexpr, range(5, 9))
WORDS_BEFORE, BLOCK_TOKENS, BLOCKS_PER_ID = map(tl.constexpr, range(9, 12))
PAGE_TILE_TOKENS, PAGE_TILE_STRIDE = map(tl.constexpr, range(12, 14))  # tiles of a block's tokens
RUN_COLUMNS = tl.constexpr(14)

# Columns of a fragment. `FIRST_TOKEN` counts from the first token of the first block id, `IDS_AT`
# from the start of the table; `SPAN_BYTES` are those of one token in all layers of the fragment.
PAYLOAD, HEAD_START, NUM_HEADS, LAYER_START, NUM_LAYERS = map(tl.constexpr, range(5))
FIRST_TOKEN, NUM_TOKENS, IDS_AT, SPAN_BYTES = map(tl.constexpr, range(5, 9))
FRAGMENT_COLUMNS = tl.constexpr(9)

# Their values change from launch to launch; a kernel compiled for each would stall a lane.
_PLAIN = (
    "runs_at", "fragments_at", "num_fragments", "num_heads", "num_token_tiles", "num_word_tiles"
)  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)  # type: ignore[untyped-decorator]
def move_fragments(  # type: ignore[no-untyped-def]
    table,
    runs_at,
    fragments_at,
    num_fragments,
    num_heads,
    num_token_tiles,
    num_word_tiles,
    IS_GATHER: tl.constexpr,
    RUNS_PER_LAYER: tl.constexpr,
    WORD: tl.constexpr,  # the integer type
    WORD_BYTES: tl.constexpr,
    UNIT_WORDS: tl.constexpr,  # all addresses, strides and sizes are multiples of so many words
    IS_STRIDED: tl.constexpr,  # elements of a run are not adjacent in the page
    IS_TILED: tl.constexpr,  # tokens of a block lie in tiles
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
) -> None:
    """Move fragments between pages and a buffer; each program moves one tile."""
    program = tl.program_id(0)
    fragment = table + fragments_at + program % num_fragments * FRAGMENT_COLUMNS
    tile = program // num_fragments
    first_word = tile % num_word_tiles * TILE_WORDS
    tile = tile // num_word_tiles
    first_token = tile % num_token_tiles * TILE_TOKENS
    tile = tile // num_token_tiles
    head = tile // RUNS_PER_LAYER % num_heads
    layer = tile // RUNS_PER_LAYER // num_heads
    # Fragments of different sizes share a launch, as large as the largest in each direction.
    num_tokens = tl.load(fragment + NUM_TOKENS).to(tl.int32)
    is_inside = (layer < tl.load(fragment + NUM_LAYERS)) & (head < tl.load(fragment + NUM_HEADS))
    if not (is_inside & (first_token < num_tokens)):
        return
    first_layer = tl.load(fragment + LAYER_START)
    first_run = table + runs_at + first_layer * RUNS_PER_LAYER * RUN_COLUMNS
    run = first_run + (layer * RUNS_PER_LAYER + tile % RUNS_PER_LAYER) * RUN_COLUMNS
    num_words = tl.multiple_of(tl.load(run + NUM_WORDS).to(tl.int32), UNIT_WORDS)
    if first_word >= num_words:
        return

    tokens = first_token + tl.arange(0, TILE_TOKENS)
    words = first_word + tl.arange(0, TILE_WORDS)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (words < num_words)[None, :]

    block_tokens = tl.load(run + BLOCK_TOKENS).to(tl.int32)
    blocks_per_id = tl.load(run + BLOCKS_PER_ID).to(tl.int32)
    in_table = tokens + tl.load(fragment + FIRST_TOKEN).to(tl.int32)
    index = in_table // block_tokens
    ids = table + tl.load(fragment + IDS_AT) + index // blocks_per_id
    blocks = tl.load(ids, mask=is_token, other=0) * blocks_per_id + index % blocks_per_id
    within = (in_table % block_tokens).to(tl.int64)

    # The hints let the compiler move 16 bytes at a time; `UNIT_WORDS` says that they are true.
    page = tl.load(run + BASE).to(tl.pointer_type(WORD))
    page = tl.multiple_of(page, UNIT_WORDS * WORD_BYTES)
    page += tl.multiple_of(
        (tl.load(fragment + HEAD_START) + head) * tl.load(run + HEAD_STRIDE), UNIT_WORDS
    )
    in_page = blocks * tl.multiple_of(tl.load(run + BLOCK_STRIDE), UNIT_WORDS)
    if IS_TILED:
        page_tile = tl.load(run + PAGE_TILE_TOKENS)
        page_tile_stride = tl.multiple_of(tl.load(run + PAGE_TILE_STRIDE), UNIT_WORDS)
        in_page += within // page_tile * page_tile_stride
        within = within % page_tile
    in_page += within * tl.multiple_of(tl.load(run + TOKEN_STRIDE), UNIT_WORDS)
    if IS_STRIDED:
        elem_words = tl.load(run + ELEM_WORDS).to(tl.int32)
        elems = (words // elem_words).to(tl.int64)
        in_row = elems * tl.load(run + ELEM_STRIDE) + words % elem_words
    else:
        in_row = words
    page_words = page + in_page[:, None] + in_row[None, :]

    payload = tl.load(fragment + PAYLOAD).to(tl.pointer_type(WORD))
    payload = tl.multiple_of(payload, UNIT_WORDS * WORD_BYTES)
    rows_before = head * (tl.load(fragment + SPAN_BYTES) // WORD_BYTES)
    rows_before += tl.load(run + WORDS_BEFORE) - tl.load(first_run + WORDS_BEFORE)
    payload += tl.multiple_of(rows_before * num_tokens + tl.load(run + ROW_OFFSET), UNIT_WORDS)
    in_payload = tokens.to(tl.int64) * tl.multiple_of(tl.load(run + ROW_WORDS), UNIT_WORDS)
    payload_words = payload + in_payload[:, None] + words[None, :]

    if IS_GATHER:
        tl.store(payload_words, tl.load(page_words, mask=mask), mask=mask)
    else:
        tl.store(page_words, tl.load(payload_words, mask=mask), mask=mask)


_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
assert RUN_COLUMNS.value == NUM_COLUMNS
assert FRAGMENT_COLUMNS.value == FRAGMENT_ENTRIES


def kernel_constants(table: RunTable, *, is_gather: bool) -> dict[str, Any]:
    """Return the compile-time arguments of the kernel."""
    return {
        "IS_GATHER": is_gather,
        "RUNS_PER_LAYER": table.runs_per_layer,
        "WORD": _WORDS[table.word_bytes],
        "WORD_BYTES": table.word_bytes,
        "UNIT_WORDS": table.unit_bytes // table.word_bytes,
        "IS_STRIDED": table.is_strided,
        "IS_TILED": table.is_tiled,
        "TILE_TOKENS": table.tile_tokens,
        "TILE_WORDS": table.tile_words,
    }
