"""Notebook 11: its exercises and figures, and the attempts of a run as tables."""
