"""Notebook 03: its exercises and its figure."""
