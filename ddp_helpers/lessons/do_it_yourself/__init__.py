"""Notebook 17: the learner's own projects, and their checkers."""
