"""Draw figures, diagrams and code on a page."""
