"""Notebook 14: a rank's memory, by kind, and the methods that reduce it."""
