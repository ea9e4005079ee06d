"""What a maintainer runs: execute the course, measure it, keep its records and its front pages.

The command line and `make` call it, in one process, in a checkout.
"""
