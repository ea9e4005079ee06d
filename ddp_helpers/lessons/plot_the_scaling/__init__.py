"""Notebook 09: its exercises."""
