"""The command `kvpool`."""

from vllm_kvpool.cli.main import main as main
