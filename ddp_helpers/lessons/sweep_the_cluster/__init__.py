"""Notebook 08: its exercises and figures."""
