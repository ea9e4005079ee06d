"""Notebook 01: its exercises and figures."""
