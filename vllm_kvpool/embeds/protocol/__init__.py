"""The messages between schedulers and workers of embeddings, and the rows they name (pure)."""
