"""Stores, which keep cells by key: files, Mooncake and S3, and guards around them."""
