"""Draw figures and diagrams with alt text, and show code on a page.

Lessons, notebooks and `upkeep` call it, in the process of a notebook; it needs matplotlib.
"""
