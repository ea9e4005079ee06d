"""Notebook 04: its exercises and figures."""
