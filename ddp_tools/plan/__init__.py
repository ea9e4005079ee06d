"""The command `plan`: list the lines of a one-device script that need a decision; no torch."""
