"""Notebook 13: models that do not fit."""
