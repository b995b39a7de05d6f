"""`python -m vllm_kvpool`, where the command `kvpool` is not on the path."""

from vllm_kvpool.cli import main

main(prog_name="kvpool")
