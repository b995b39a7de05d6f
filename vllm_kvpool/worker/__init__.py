"""The part of the pool in a worker's process, on the model's thread."""
