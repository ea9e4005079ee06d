"""Tools of a maintainer: execute the course, measure it, keep its records and its front pages.

It runs in one process, in a checkout.
"""
