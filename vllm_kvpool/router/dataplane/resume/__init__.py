"""A single stream to the client, made of the streams of several engines (pure)."""
