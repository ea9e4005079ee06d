"""Notebook 07: the terminal in a cell, its exercises, and its figures."""
