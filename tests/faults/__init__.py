"""The fault matrix: real processes, harmed at a chosen moment, and what must hold afterwards."""
