"""Python imports this file by itself, first of all, where this folder is on the PYTHONPATH.

An import of torch makes half a million objects, and the garbage collector looks through them again and again: a fifth
of the time. The course's runs start some four hundred processes. Let it look less often.
"""

import gc

gc.set_threshold(100_000, 50, 1000)
