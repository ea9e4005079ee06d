"""Notebook 09: its exercises and figures."""
