"""Two prefill and two decode engines of a tiny model on this machine, and a router in front.

    python examples/07_router.py               # until Ctrl-C; it says how to send a load
    python examples/07_router.py --prefill 1 --decode 1 --once

Engines are real vLLM servers on CPU; they share a pool of files. All that is written is below
`up/`: the router's configuration, its log and those of the engines. The planner only says what it
would do (`dry_run`); roles can be changed at the administration's address, with the token. Ctrl-C
and SIGTERM end everything; a second one in the same directory is refused.
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).parents[1]))  # also where the package is installed
from tests.support.deployment import TOKEN, Deployment, DeploymentSpec, running
from tests.support.stream_client import complete

UP = Path("up")
BENCH = (
    "from vllm.benchmarks import serve; from vllm.utils import argparse_utils; "
    "parser = argparse_utils.FlexibleArgumentParser(); serve.add_cli_args(parser); "
    "serve.main(parser.parse_args())"
)
QUESTION = "tell me a story about a router that never lost a token of any stream " * 8


def main() -> None:
    """Start, ask once, wait."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--once", action="store_true", help="end after the first answer")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    lock = take_directory()
    spec = DeploymentSpec(
        prefill=args.prefill, decode=args.decode, sections={"planner": {"mode": "dry_run"}}
    )
    print(f"starting {args.prefill} prefill and {args.decode} decode engines (a minute or two)")
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"  {time.monotonic() - began:4.0f} s  {what}", flush=True)

    deployment = Deployment.start(spec, UP.absolute(), say)
    try:
        (UP / "addresses.sh").write_text(f"FRONT={deployment.front}\nADMIN={deployment.admin}\n")
        (UP / "token").write_text(TOKEN)
        print(f"up after {time.monotonic() - began:.0f} s; logs and configuration: {UP}/")
        print(f"clients:     {deployment.front}/v1   model: tiny")
        print(f"status page: {deployment.admin}/#token={TOKEN}")
        told = complete(deployment.front, QUESTION, max_tokens=16)
        print(f"first answer: {len(told.token_ids)} tokens, {told.usage}")
        if not args.once:
            model = next(UP.glob("models/llama*"))
            print(f"a load:      {bench_command()} \\")
            print(f"               --base-url {deployment.front} --model tiny \\")
            print(f"               --tokenizer {model} --dataset-name random --num-prompts 200 \\")
            print("               --random-input-len 300 --random-output-len 32 --request-rate 8")
            print(f"its record:  python examples/08_router_record.py {deployment.admin} \\")
            print(f"               --token-file {UP}/token")
            print("Ctrl-C here ends everything")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(1)
    finally:
        print("ending", flush=True)
        deployment.stop()
        lock.close()


def bench_command() -> str:
    """`vllm bench serve`, or the same without `vllm`, which starts from no other distribution."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return f"{sys.executable} -c '{BENCH}'"
    return "vllm bench serve"


def take_directory() -> IO[str]:
    """Empty the directory and hold it, unless another one does, or what that has started runs."""
    UP.mkdir(exist_ok=True)
    lock = (UP / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(
            f"a deployment runs already in {UP.absolute()}; end it: kill {(UP / 'pid').read_text()}"
        )
    if left := running(UP):  # of one that was killed
        groups = " ".join(f"-{pid}" for pid in left.values())
        sys.exit(f"engines of an earlier deployment run; end them: kill -- {groups}")
    for each in UP.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name != "lock":
            each.unlink()
    (UP / "pid").write_text(str(os.getpid()))
    return lock


if __name__ == "__main__":
    main()
