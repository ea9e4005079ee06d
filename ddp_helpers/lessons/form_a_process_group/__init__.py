"""Notebook 02: its exercises and figures."""
