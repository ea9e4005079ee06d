"""Notebook 12: traces, an input pipeline, and a network with a dial."""
