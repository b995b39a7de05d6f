"""Notices from an engine that saves a prompt to the engine that waits for it."""
