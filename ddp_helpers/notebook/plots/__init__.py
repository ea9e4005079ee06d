"""Figures of what was measured; each is drawn from records alone."""
