"""Notebook 01: its exercises and its figure."""
