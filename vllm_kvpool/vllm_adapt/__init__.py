"""The code that knows vLLM: everything else of the pool can be used and tested without it."""
