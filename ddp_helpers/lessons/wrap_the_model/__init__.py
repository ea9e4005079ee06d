"""Notebook 05: its exercises and figures."""
