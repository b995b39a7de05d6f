"""What many engines ask of what they share, from unit costs: the tables of docs/scale.md.

    python benchmarks/scale.py

Unit costs are those of `results/scale.json`, `lookup.json` and `router_cpu.json`; the traffic of an
engine is the mean of a production chat trace. Nothing here is a measurement of so many engines.
Loads are one engine's, times the number: no queue, no burst, no slower call where more clients ask.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_kvpool.layout.topology import default_layer_span
from vllm_kvpool.scheduler.prefix_search import SAMPLES
from vllm_kvpool.worker.lane_limits import BATCH_BYTES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "scale.md"
ENGINES = (16, 256, 2048)
REPLICAS = (512, 4096)
GB = 1e9
ROUND_CELLS = 128
ROUNDS, CHUNKS_ASKED_WHOLE = 2, 4  # of a lookup that finds a part (results/lookup.json)
EVENTS_OF_A_REQUEST = ("Arrived", "PrefillEnded", "DecodeBegan", "DecodeEnded")
BUSY = 0.7  # of a core, a router
METRICS_EVERY_S = 1.0  # `[health] every_s`


@dataclass(frozen=True, slots=True)
class Model:
    """What a token's KV is made of."""

    layers: int = 80
    kv_heads: int = 8
    row_bytes: int = 512  # of a token, a layer and a head: keys and values

    @property
    def token_bytes(self) -> int:
        return self.layers * self.kv_heads * self.row_bytes


@dataclass(frozen=True, slots=True)
class Cells:
    """How a model's KV is cut."""

    chunk_tokens: int
    a_chunk: int
    a_call: int  # of a rank, in one call of a store

    @classmethod
    def of(cls, model: Model, chunk_tokens: int = 256, layer_span: int = 0) -> "Cells":
        """As the options of these names say; 0 is the default."""
        span = layer_span or default_layer_span(model.layers, model.row_bytes, chunk_tokens)
        cell_bytes = span * chunk_tokens * model.row_bytes
        a_chunk = -(-model.layers // span) * model.kv_heads
        return cls(chunk_tokens, a_chunk, max(1, BATCH_BYTES // cell_bytes))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one engine."""

    requests_s: float = 0.5
    prompt_tokens: float = 12_035.0
    answer_tokens: float = 343.0
    found: float = 0.366  # of the prompt's tokens, in the pool

    @property
    def loaded_tokens_s(self) -> float:
        return self.requests_s * self.prompt_tokens * self.found

    @property
    def saved_tokens_s(self) -> float:
        return self.requests_s * self.prompt_tokens * (1 - self.found)


class Load(NamedTuple):
    """Of one engine at a Mooncake master, by second."""

    keys: float
    calls: float
    cpu_s: float


class CallCost(NamedTuple):
    """CPU seconds at the master of calls with so many keys."""

    keys: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, calls: float, keys: float) -> Load:
        """Between the sizes that were measured."""
        return Load(keys, calls, calls * float(np.interp(keys / calls, self.keys, self.seconds)))

    def row(self, kind: str) -> dict[str, object]:
        """Of the table of costs."""
        row: dict[str, object] = {"call": kind}
        for keys, seconds in zip(self.keys, self.seconds, strict=True):
            row[f"of {keys}, us"] = number(1e6 * seconds)
        return row


def lookup_keys(traffic: Traffic, cells: Cells) -> float:
    """Of both rounds: samples and the last chunk, then the chunks where samples end."""
    samples = min(traffic.prompt_tokens / cells.chunk_tokens, SAMPLES)
    return samples + (1 + CHUNKS_ASKED_WHOLE) * cells.a_chunk


def master_load(traffic: Traffic, cells: Cells, costs: dict[str, CallCost]) -> Load:
    """Lookups in two rounds, loads, and saves that ask first what is there."""
    keys = lookup_keys(traffic, cells)
    lookups = costs["exists"].of(ROUNDS * traffic.requests_s, traffic.requests_s * keys)
    loaded = traffic.loaded_tokens_s / cells.chunk_tokens * cells.a_chunk
    saved = traffic.saved_tokens_s / cells.chunk_tokens * cells.a_chunk
    parts = [
        lookups,
        costs["get"].of(loaded / cells.a_call, loaded),
        costs["exists"].of(saved / cells.a_call, saved),
        costs["put"].of(saved / cells.a_call, saved),
    ]
    return Load(*(sum(each) for each in zip(*parts, strict=True)))


def controller_cores(row: dict[str, Any], requests_s: float) -> float:
    """What routers take to decide: each request's events, and each replica's metrics."""
    by_request = sum(row[f"{kind} us"] for kind in EVENTS_OF_A_REQUEST)
    by_replica = row["Measured us"] / METRICS_EVERY_S
    return 1e-6 * (requests_s * by_request + row["replicas"] * by_replica + row["Tick us"])


def serving_cores(rows: list[dict[str, Any]], requests_s: float, answer_tokens: float) -> float:
    """What routers take to serve clients and speak to engines."""
    [ours] = [row for row in rows if row["side"] == "ours, data plane alone"]
    by_request = ours["us a short request"] + answer_tokens * ours["us a streamed token"]
    return 1e-6 * requests_s * by_request


def index_rows(rows: list[dict[str, Any]], model: Model, cells: Cells) -> list[dict[str, object]]:
    """What the index of a `file://` directory takes, at each number of cells."""
    cell_bytes = cells.chunk_tokens * model.token_bytes / cells.a_chunk
    found: list[dict[str, object]] = []
    for row in rows:
        if row["what"] == "file index":
            cells_s = 1e3 * ROUND_CELLS / row["put and evict ms"]
            found.append(
                {
                    "cells": number(row["cells"]),
                    "of KV, TB": number(row["cells"] * cell_bytes / 1e12),
                    "index, MB": number(row["cells"] * row["bytes a cell"] / 1e6),
                    "opened in ms": number(row["open ms"]),
                    "put of 128, ms": number(row["put ms"]),
                    "with evictions": number(row["put and evict ms"]),
                    "128 hits, ms": number(row["hits ms"]),
                    "most cells/s": number(cells_s),
                    "GB/s of cells": number(cells_s * cell_bytes / GB),
                }
            )
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows]
    return "\n".join(lines)


def results(name: str) -> list[dict[str, Any]]:
    """The kept rows of a benchmark."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def call_costs(rows: list[dict[str, Any]]) -> dict[str, CallCost]:
    """By kind of call."""
    found = {}
    for row in rows:
        if row["what"].startswith("Mooncake master"):
            sizes = {int(name.split()[-1]): name for name in row if name.startswith("us a call of")}
            seconds = tuple(1e-6 * row[name] for name in sizes.values())
            found[row["what"].rpartition(" ")[2]] = CallCost(tuple(sizes), seconds)
    return found


def number(value: float) -> str:
    """With three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


SETTINGS = {
    "defaults": {},
    "`layer_span: 80`": {"layer_span": 80},
    "`chunk_tokens: 512`, `layer_span: 80`": {"chunk_tokens": 512, "layer_span": 80},
}


def traffic_rows(model: Model, traffic: Traffic) -> list[dict[str, object]]:
    """What is assumed of an engine, and what a lookup asks for."""
    cells = Cells.of(model)
    return [
        {
            "requests/s": traffic.requests_s,
            "prompt tokens": number(traffic.prompt_tokens),
            "answer tokens": number(traffic.answer_tokens),
            "found": f"{traffic.found:.1%}",
            "KiB of KV a token": number(model.token_bytes / 1024),
            "cells a chunk": cells.a_chunk,
            "lookup rounds": ROUNDS,
            "keys a lookup": number(lookup_keys(traffic, cells)),
        }
    ]


def master_rows(
    model: Model, traffic: Traffic, costs: dict[str, CallCost]
) -> list[dict[str, object]]:
    """A row for each setting and number of engines."""
    rows: list[dict[str, object]] = []
    for setting, options in SETTINGS.items():
        load = master_load(traffic, Cells.of(model, **options), costs)
        for engines in ENGINES:
            row = {"options": setting, "engines": number(engines)}
            row["lookup rounds/s"] = number(engines * ROUNDS * traffic.requests_s)
            row |= {"keys/s": number(engines * load.keys), "calls/s": number(engines * load.calls)}
            row["cores of one master"] = number(engines * load.cpu_s)
            row["of each of four"] = number(engines * load.cpu_s / 4)
            rows.append(dict(row))
    return rows


def link_rows(model: Model, traffic: Traffic) -> list[dict[str, object]]:
    """Bytes between engines and the hosts that hold segments."""
    loaded, saved = (
        tokens * model.token_bytes / GB
        for tokens in (traffic.loaded_tokens_s, traffic.saved_tokens_s)
    )
    return [
        {
            "engines": number(engines),
            "loaded, GB/s": number(engines * loaded),
            "saved, GB/s": number(engines * saved),
            "each way at each engine's link, Gbit/s": number(8 * (loaded + saved)),
        }
        for engines in ENGINES
    ]


def router_rows(
    controller: list[dict[str, Any]], cpu: list[dict[str, Any]], traffic: Traffic
) -> list[dict[str, object]]:
    """A row for each number of replicas; all of them compute prompts."""
    rows: list[dict[str, object]] = []
    for row in controller:
        requests_s = row["replicas"] * traffic.requests_s
        serving = serving_cores(cpu, requests_s, traffic.answer_tokens)
        deciding = controller_cores(row, requests_s)
        rows.append(
            {
                "replicas": number(row["replicas"]),
                "requests/s": number(requests_s),
                "tokens/s": number(requests_s * traffic.answer_tokens),
                "cores that serve": number(serving),
                "cores that decide": number(deciding),
                "routers": number(math.ceil((serving + deciding) / BUSY)),
            }
        )
    return rows


def limits(
    model: Model,
    traffic: Traffic,
    costs: dict[str, CallCost],
    controller: list[dict[str, Any]],
) -> list[dict[str, object]]:
    """What one core of each shared thing is enough for, the least first."""
    found = [
        (
            1 / master_load(traffic, Cells.of(model, **options), costs).cpu_s,
            f"a core of the Mooncake master, {setting}",
        )
        for setting, options in SETTINGS.items()
    ]
    found += [
        (
            row["replicas"] / controller_cores(row, row["replicas"] * traffic.requests_s),
            f"the router's controller, at its costs of {number(row['replicas'])} replicas",
        )
        for row in controller
    ]
    return [
        {"engines": number(engines), "fill one core of": what} for engines, what in sorted(found)
    ]


def tables() -> dict[str, str]:
    """The tables of docs/scale.md by name."""
    model, traffic = Model(), Traffic()
    rows = results("scale")
    costs = call_costs(rows)
    controller = [row for row in rows if row["what"] == "router's controller"]
    found: dict[str, list[dict[str, object]]] = {
        "traffic": traffic_rows(model, traffic),
        "limits": limits(model, traffic, costs, controller),
        "costs": [cost.row(kind) for kind, cost in costs.items()],
        "master": master_rows(model, traffic, costs),
        "links": link_rows(model, traffic),
        "index": index_rows(rows, model, Cells.of(model)),
        "router": router_rows(controller, results("router_cpu"), traffic),
    }
    return {name: table(each) for name, each in found.items()}


def filled(text: str, by_name: dict[str, str]) -> str:
    """The document with these tables between its `<!-- name -->` and `<!-- end -->`."""
    for name, each in by_name.items():
        start = text.index(f"<!-- {name} -->\n") + len(f"<!-- {name} -->\n")
        text = text[:start] + each + "\n" + text[text.index("<!-- end -->", start) :]
    return text


def main() -> None:
    DOCUMENT.write_text(filled(DOCUMENT.read_text(), tables()))


if __name__ == "__main__":
    main()
