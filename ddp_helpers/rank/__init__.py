"""The code that runs on every rank, and from which the scripts are written.

It needs only torch and torchvision.
"""
