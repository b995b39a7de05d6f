"""The arithmetic of benchmarks/scale.py, and that docs/scale.md has what it gives."""

import pytest

from benchmarks.scale import (
    DOCUMENT,
    CallCost,
    Cells,
    Model,
    Traffic,
    controller_cores,
    filled,
    index_rows,
    lookup_keys,
    master_load,
    number,
    serving_cores,
    tables,
)

TRAFFIC = Traffic(requests_s=2.0, prompt_tokens=2560.0, answer_tokens=100.0, found=0.25)
MODEL = Model(layers=8, kv_heads=2, row_bytes=512)


def test_cells_are_cut_as_the_options_say() -> None:
    assert Cells.of(MODEL) == Cells(256, 4 * 2, (16 << 20) // (2 * 256 * 512))
    assert Cells.of(MODEL, chunk_tokens=512, layer_span=8) == Cells(512, 2, 8)
    assert MODEL.token_bytes == 8192


def test_a_masters_load_is_that_of_lookups_loads_and_saves() -> None:
    cells = Cells(256, 8, 4)
    free = dict.fromkeys(("exists", "get", "put"), CallCost((1, 100), (0.0, 0.0)))
    assert lookup_keys(TRAFFIC, cells) == 10 + 5 * 8
    load = master_load(TRAFFIC, cells, free)
    loaded, saved = 2 * 2.5 * 8, 2 * 7.5 * 8  # cells by second
    assert load.keys == pytest.approx(2 * 50 + loaded + 2 * saved)
    assert load.calls == pytest.approx(2 * 2 + (loaded + 2 * saved) / 4)
    assert load.cpu_s == 0
    only_puts = {**free, "put": CallCost((1, 9), (0.75, 2.75))}
    assert master_load(TRAFFIC, cells, only_puts).cpu_s == pytest.approx(saved / 4 / 2 + saved / 4)


def test_a_routers_load_is_that_of_requests_and_replicas() -> None:
    row = {"replicas": 100, "Measured us": 10.0, "Tick us": 1000.0}
    row |= {
        f"{kind} us": 50.0 for kind in ("Arrived", "PrefillEnded", "DecodeBegan", "DecodeEnded")
    }
    assert controller_cores(row, 1000.0) == pytest.approx(0.2 + 0.001 + 0.001)
    cpu = [{"side": "ours, data plane alone", "us a short request": 100, "us a streamed token": 10}]
    assert serving_cores(cpu, 1000.0, 90.0) == pytest.approx(1.0)


def test_an_index_takes_as_many_bytes_as_its_transactions_allow() -> None:
    row = {"what": "file index", "cells": 1_000_000, "bytes a cell": 30.0, "open ms": 1.0}
    row |= {"put ms": 1.0, "put and evict ms": 2.0, "hits ms": 1.0}
    [found] = index_rows([row, {"what": "another"}], MODEL, Cells(256, 8, 4))
    assert (found["most cells/s"], found["index, MB"]) == ("64,000", "30")
    assert (found["of KV, TB"], found["GB/s of cells"]) == ("0.262", "16.8")


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_a_number_has_the_digits_that_count(value: float, text: str) -> None:
    assert number(value) == text


def test_the_document_has_the_tables_of_the_kept_results() -> None:
    text = DOCUMENT.read_text()
    assert filled(text, tables()) == text
