"""What runs on every rank: the one source of every line of a script. It needs torch and torchvision alone."""
