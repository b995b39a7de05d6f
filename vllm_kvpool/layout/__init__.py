"""The places of KV bytes: which cells there are, and where engines' pages have them (pure)."""
