"""The two projects of notebook 13, and what judges them: a run of one's own net, and a faulty script that is mended."""
