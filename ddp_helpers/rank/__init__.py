"""What runs on every rank, and what the scripts are written out from.

It needs torch and torchvision alone.
"""
