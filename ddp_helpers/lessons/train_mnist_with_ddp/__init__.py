"""Notebook 06: its exercises and figures."""
