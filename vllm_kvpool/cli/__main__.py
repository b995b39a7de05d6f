"""`python -m vllm_kvpool.cli`, where the command is not on the path."""

from vllm_kvpool.cli.main import main

main()
