"""Notebook 12: traces, and a network with a dial."""
