"""The Triton kernel that moves pieces of cells between pages and payloads, any number at a time.

It knows addresses and strides, not formats, and works on machine words whatever the dtype. One
program moves one tile: `TILE_TOKENS` tokens by `TILE_WORDS` words of a run of one head and layer
of one piece. All that it needs is in one int64 table: rows of runs, rows of pieces, block ids.

Programs of different pieces and the same tile are neighbours: pieces are mostly the heads of the
same tokens, which lie side by side in token-major pages.
"""

import triton
import triton.language as tl

# Columns of a run. Strides, sizes and offsets in words, the base address in bytes.
BASE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, ELEM_STRIDE = map(tl.constexpr, range(5))
ELEM_WORDS, NUM_WORDS, ROW_OFFSET, ROW_WORDS = map(tl.constexpr, range(5, 9))
WORDS_BEFORE, BLOCK_TOKENS, BLOCKS_PER_ID = map(tl.constexpr, range(9, 12))
RUN_COLUMNS = tl.constexpr(12)

# Columns of a piece. `FIRST_TOKEN` counts from the first token of the first block id, `IDS_AT` from
# the start of the table; `SPAN_BYTES` are those of one token in all layers of the piece.
PAYLOAD, LAYER_START, NUM_LAYERS, HEAD_START, NUM_HEADS = map(tl.constexpr, range(5))
FIRST_TOKEN, NUM_TOKENS, IDS_AT, SPAN_BYTES = map(tl.constexpr, range(5, 9))
PIECE_COLUMNS = tl.constexpr(9)

# Their values change from launch to launch; a kernel compiled for each would stall a lane.
_PLAIN = (
    "runs_at", "pieces_at", "num_pieces", "num_heads", "num_token_tiles", "num_word_tiles"
)  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)  # type: ignore[untyped-decorator]
def move_pieces(  # type: ignore[no-untyped-def]
    table,
    runs_at,
    pieces_at,
    num_pieces,
    num_heads,
    num_token_tiles,
    num_word_tiles,
    IS_GATHER: tl.constexpr,
    RUNS_PER_LAYER: tl.constexpr,
    WORD: tl.constexpr,  # the integer type
    WORD_BYTES: tl.constexpr,
    UNIT_WORDS: tl.constexpr,  # all addresses, strides and sizes are multiples of so many words
    IS_STRIDED: tl.constexpr,  # elements of a run are not adjacent in the page
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    piece = table + pieces_at + program % num_pieces * PIECE_COLUMNS
    tile = program // num_pieces
    first_word = tile % num_word_tiles * TILE_WORDS
    tile = tile // num_word_tiles
    first_token = tile % num_token_tiles * TILE_TOKENS
    tile = tile // num_token_tiles
    head = tile // RUNS_PER_LAYER % num_heads
    layer = tile // RUNS_PER_LAYER // num_heads
    # Pieces of different sizes share a launch, which is as large as the largest in each direction.
    num_tokens = tl.load(piece + NUM_TOKENS).to(tl.int32)
    is_inside = (layer < tl.load(piece + NUM_LAYERS)) & (head < tl.load(piece + NUM_HEADS))
    if not (is_inside & (first_token < num_tokens)):
        return
    first_layer = tl.load(piece + LAYER_START)
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
    in_table = tokens + tl.load(piece + FIRST_TOKEN).to(tl.int32)
    index = in_table // block_tokens
    ids = table + tl.load(piece + IDS_AT) + index // blocks_per_id
    blocks = tl.load(ids, mask=is_token, other=0) * blocks_per_id + index % blocks_per_id
    within = (in_table % block_tokens).to(tl.int64)

    # The hints let the compiler move 16 bytes at a time; `UNIT_WORDS` says that they are true.
    page = tl.load(run + BASE).to(tl.pointer_type(WORD))
    page = tl.multiple_of(page, UNIT_WORDS * WORD_BYTES)
    page += tl.multiple_of(
        (tl.load(piece + HEAD_START) + head) * tl.load(run + HEAD_STRIDE), UNIT_WORDS
    )
    in_page = blocks * tl.multiple_of(tl.load(run + BLOCK_STRIDE), UNIT_WORDS)
    in_page += within * tl.multiple_of(tl.load(run + TOKEN_STRIDE), UNIT_WORDS)
    if IS_STRIDED:
        elem_words = tl.load(run + ELEM_WORDS).to(tl.int32)
        elems = (words // elem_words).to(tl.int64)
        in_row = elems * tl.load(run + ELEM_STRIDE) + words % elem_words
    else:
        in_row = words
    page_words = page + in_page[:, None] + in_row[None, :]

    payload = tl.load(piece + PAYLOAD).to(tl.pointer_type(WORD))
    payload = tl.multiple_of(payload, UNIT_WORDS * WORD_BYTES)
    rows_before = head * (tl.load(piece + SPAN_BYTES) // WORD_BYTES)
    rows_before += tl.load(run + WORDS_BEFORE) - tl.load(first_run + WORDS_BEFORE)
    payload += tl.multiple_of(rows_before * num_tokens + tl.load(run + ROW_OFFSET), UNIT_WORDS)
    in_payload = tokens.to(tl.int64) * tl.multiple_of(tl.load(run + ROW_WORDS), UNIT_WORDS)
    payload_words = payload + in_payload[:, None] + words[None, :]

    if IS_GATHER:
        tl.store(payload_words, tl.load(page_words, mask=mask), mask=mask)
    else:
        tl.store(page_words, tl.load(payload_words, mask=mask), mask=mask)
