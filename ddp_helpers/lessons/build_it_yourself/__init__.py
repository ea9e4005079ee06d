"""Notebook 16: its exercises, their checkers and the figures."""
