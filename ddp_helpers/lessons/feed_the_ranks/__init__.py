"""Notebook 13: the input pipeline of many ranks."""
