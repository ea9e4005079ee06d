"""A colour as light: what every measure of colours begins with."""

import numpy as np

# sRGB to CIE XYZ (IEC 61966-2-1).
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    """Linear RGB of a colour such as #0072B2, each from 0 to 1."""
    share = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
