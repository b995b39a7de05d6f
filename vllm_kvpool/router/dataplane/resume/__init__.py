"""One stream to the client out of the streams of several engines (pure)."""
