"""The movement of embeddings' rows: windows, writers, and the threads that run them."""
