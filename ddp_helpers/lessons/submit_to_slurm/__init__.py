"""Notebook 07: the way of a job, and a terminal in cells."""
