"""Notebook 10: the clinic of faults, and the hang lab."""
