"""Notebook 09: figures, a model of the seconds, and what to ask for."""
