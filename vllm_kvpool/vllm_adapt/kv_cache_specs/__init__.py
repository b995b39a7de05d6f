"""The pool's layer groups and pages, read from vLLM's KV cache specs."""
