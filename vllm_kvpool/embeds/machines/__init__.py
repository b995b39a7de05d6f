"""The state machines of consumers, producers and sessions (pure)."""
