"""`python -m tests.soak --minutes 10`: the long soak, with a line a round and a summary as JSON.

`--lines` keeps the figures of each round as a line of JSON.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from tests.soak.crew import SLACK_S, Trouble
from tests.soak.rounds import SCENES, Soak, open_scene


def soak(
    name: str,
    seed: int,
    seconds: float,
    most_rounds: int,
    slack_s: float,
    keep: Callable[[dict[str, object]], None],
) -> Iterator[dict[str, object]]:
    """Rounds in one scene until the time is over, or the number of them is reached; what they
    counted. After a Trouble, which is among it, the scene begins anew with the next seed."""
    deadline = time.monotonic() + seconds
    left = most_rounds
    while left > 0 and time.monotonic() < deadline:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="kvpool-soak-")))
            scene = stack.enter_context(open_scene(name, directory))
            soak = Soak(scene, seed, say, directory, keep, slack_s)
            stack.callback(soak.close)
            found = ""
            try:
                soak.begin()
                while soak.rounds < left and time.monotonic() < deadline:
                    soak.round()
                soak.end()
            except Trouble as trouble:
                found = str(trouble)
                say(f"TROUBLE {found}")
            yield {**soak.summary(), "trouble": found}
        left -= max(1, soak.rounds)
        seed += 1


def write(lines: IO[str] | None, sample: dict[str, object]) -> None:
    if lines is not None:
        print(json.dumps(sample), file=lines, flush=True)


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all scenes together")
    parser.add_argument("--rounds", type=int, default=100_000, help="at most, for each scene")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--slack", type=float, default=SLACK_S, help="seconds answers may be late")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--lines", type=Path, help="where the rounds' figures go")
    parser.add_argument("--json", type=Path, help="where the summary goes; else it is printed")
    arguments = parser.parse_args()
    say(f"seed {arguments.seed}")
    summaries: list[dict[str, object]] = []
    seconds = arguments.minutes * 60 / len(arguments.scenes)
    with ExitStack() as stack:
        lines = stack.enter_context(arguments.lines.open("w")) if arguments.lines else None
        for name in arguments.scenes:
            summaries += soak(
                name,
                arguments.seed,
                seconds,
                arguments.rounds,
                arguments.slack,
                partial(write, lines),
            )
    text = json.dumps({"seed": arguments.seed, "scenes": summaries}, indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    else:
        say(text)
    return any(summary["trouble"] for summary in summaries)


if __name__ == "__main__":
    sys.exit(main())
