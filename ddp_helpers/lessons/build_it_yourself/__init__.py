"""Notebook 16: its exercises, their judge and the figures."""
