"""Notebook 07: the stages of a job, and a terminal in cells."""
