"""Notebook 05: DDP by hand, and its figures."""
