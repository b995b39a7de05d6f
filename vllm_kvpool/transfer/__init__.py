"""Transfers of cells between pages, host memory and stores: the engine thread and its lanes."""
