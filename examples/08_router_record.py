"""Records the state of a router once a second, and draws it if matplotlib is there.

    make up                                                 # or any router
    python examples/08_router_record.py http://127.0.0.1:8001 --token-file up/token
    vllm bench serve --base-url http://127.0.0.1:8000 --model MODEL     # meanwhile; then Ctrl-C

Writes `router.jsonl`, one answer of `GET /state` a line, and `router.png`: roles and locks of the
replicas, requests that wait, blocks in use.
"""

import argparse
import contextlib
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

EVERY_S, TIMEOUT_S = 1.0, 5.0
COLOURS = {"prefill": "#4477aa", "decode": "#228833"}
IDLE = "#bbbbbb"


def record(url: str, token: str, seconds: float, out: Path) -> list[dict[str, Any]]:
    """Return the states, each with `at_s` since the begin; a router that is away is left out."""
    request = urllib.request.Request(
        f"{url.rstrip('/')}/state", headers={"Authorization": f"Bearer {token}"}
    )
    states: list[dict[str, Any]] = []
    began = time.monotonic()
    with out.open("w") as lines, contextlib.suppress(KeyboardInterrupt):
        while (at_s := time.monotonic() - began) < seconds:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(request, None, TIMEOUT_S) as got,
            ):
                states.append({"at_s": at_s, **json.load(got)})
                print(json.dumps(states[-1]), file=lines, flush=True)
            time.sleep(EVERY_S)
    return states


def draw(states: list[dict[str, Any]], out: Path) -> None:
    """ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    roles, backlog = figure.subplots(2, 1, sharex=True)
    names = list(dict.fromkeys(each["id"] for state in states for each in state["replicas"]))
    for state in states:
        for each in state["replicas"]:
            roles.barh(
                names.index(each["id"]),
                EVERY_S,
                left=state["at_s"],
                color=COLOURS.get(each["state"], IDLE),
                hatch="////" if each["locked"] else None,
            )
    roles.set_yticks(range(len(names)), names)
    roles.set_title("blue: prefill, green: decode, grey: neither, hatched: locked", fontsize=9)
    times = [state["at_s"] for state in states]
    for name in ("queue", "migration"):
        backlog.step(times, [state[name]["requests"] for state in states], label=name)
    backlog.set_ylabel("requests that wait")
    backlog.set_xlabel("seconds")
    backlog.legend(loc="upper left")
    blocks = backlog.twinx()
    blocks.plot(times, [max(map(_share, state["replicas"])) for state in states], color="#aa3377")
    blocks.set_ylabel("blocks in use, fullest replica", color="#aa3377")
    figure.savefig(out, dpi=110)


def _share(replica: dict[str, Any]) -> float:
    return float(replica["used_blocks"] / (replica["total_blocks"] or 1))


def main() -> None:
    """Record until the time is over or Ctrl-C, then draw."""
    parser = argparse.ArgumentParser(description="Record the state of a router, and draw it.")
    parser.add_argument("admin", help="the administration's address")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path("router"), help="without an ending")
    args = parser.parse_args()
    token = args.token_file.read_text().strip()
    states = record(args.admin, token, args.seconds, args.out.with_suffix(".jsonl"))
    try:
        if states:
            draw(states, args.out.with_suffix(".png"))
    except ImportError:
        print("no plot: matplotlib is not installed")
    print(f"{len(states)} states in {args.out.with_suffix('.jsonl')}")


if __name__ == "__main__":
    main()
