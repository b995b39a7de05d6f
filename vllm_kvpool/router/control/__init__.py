"""The router's decisions about requests and replicas (pure)."""
