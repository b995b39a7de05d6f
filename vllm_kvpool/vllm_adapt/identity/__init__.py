"""The namespace of an engine's cells: everything in vLLM's configuration that changes KV."""
