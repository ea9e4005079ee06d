"""The command `plan`: the lines of a script for one device that need a decision; no torch."""
