"""Whole processes over shared stores while masters, processes and links are killed."""
