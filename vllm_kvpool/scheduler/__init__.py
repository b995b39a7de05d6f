"""The part of the pool in the scheduler's process: lookups, and plans of loads and saves."""
