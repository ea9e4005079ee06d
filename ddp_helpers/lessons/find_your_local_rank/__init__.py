"""Notebook 03: its exercises and figures."""
