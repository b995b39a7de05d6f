"""The names of cells: keys, hashes of prompts' chunks, and the identity of weights."""
