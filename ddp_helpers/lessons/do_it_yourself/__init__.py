"""Notebook 14: projects of one's own, and what judges them."""
