"""`vllm serve --headless`: the workers of an engine's further host, without a server.

The command itself asks for the metadata of a package `vllm`, which vLLM's wheel for CPUs lacks.
"""

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":
    main()
