"""Notebook 08: the sweep, its exercises and figures."""
