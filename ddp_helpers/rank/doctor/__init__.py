"""The checks of the script `doctor`."""
