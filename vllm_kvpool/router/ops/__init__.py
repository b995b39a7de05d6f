"""The router's operations: engines' start, discovery and health, status, metrics and logs."""
