"""`python -m tests.soak --minutes 10`: the long soak, with a line a round and a summary as JSON."""

import argparse
import json
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.soak.rounds import Soak, open_scene

SCENES = ("file", "mooncake", "tiers")


def soak(
    name: str, directory: Path, seed: int, seconds: float, most_rounds: int
) -> dict[str, object]:
    """Rounds in one scene until the time is over, or the number of them is reached."""
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        scene = stack.enter_context(open_scene(name, directory))
        soak = Soak(scene, seed, say, directory)
        stack.callback(soak.close)
        soak.begin()
        while soak.rounds < most_rounds and time.monotonic() < deadline:
            soak.round()
        soak.end()
        return soak.summary()


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all scenes together")
    parser.add_argument("--rounds", type=int, default=1_000, help="at most, for each scene")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=SCENES)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--json", type=Path, help="where the summary goes; else it is printed")
    arguments = parser.parse_args()
    say(f"seed {arguments.seed}")
    summaries = []
    for name in arguments.scenes:
        seconds = arguments.minutes * 60 / len(arguments.scenes)
        with tempfile.TemporaryDirectory(prefix="kvpool-soak-") as directory:
            summaries.append(soak(name, Path(directory), arguments.seed, seconds, arguments.rounds))
    text = json.dumps({"seed": arguments.seed, "scenes": summaries}, indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    else:
        say(text)


if __name__ == "__main__":
    main()
