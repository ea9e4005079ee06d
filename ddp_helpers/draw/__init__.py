"""Draw figures and diagrams with alt text, and show code on a page; it needs matplotlib."""
