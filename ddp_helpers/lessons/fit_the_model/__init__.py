"""Notebook 14: a rank's memory, by kind, and what gives some of it back."""
