"""Notebook 15: models that do not fit on one GPU."""
