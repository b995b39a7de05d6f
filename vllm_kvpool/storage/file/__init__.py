"""The `file://` store: a directory of cells with an index in SQLite."""
