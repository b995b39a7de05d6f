"""KV cache shared by any number of vLLM engines, whatever their parallelism and layout."""

__version__ = "0.1.0"
