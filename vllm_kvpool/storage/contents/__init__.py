"""The contents of stores' objects: cells with their headers, encryption, manifests, aliases."""
