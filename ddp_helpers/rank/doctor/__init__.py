"""The preflight: what a job needs, looked at on all its ranks, judged, and told in one table."""
