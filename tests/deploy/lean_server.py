"""vLLM's server, whose engine core is forked from it.

On CPUs vLLM starts a new Python for the core, which imports vLLM and the server once more. Tests of
what stands before a server need no second import.
"""

import multiprocessing
import runpy

from vllm.v1.engine import utils


def main() -> None:
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
