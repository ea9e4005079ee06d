"""Look at a script or a model of one's own: audit, memory, fits."""
