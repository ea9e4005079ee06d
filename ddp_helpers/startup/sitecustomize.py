"""Python imports this file by itself, first of all, where this folder is on the PYTHONPATH.

An import of torch makes half a million objects, and the garbage collector looks through them again and again. That took
0.5 of 3.2 seconds, and every rank of every launch imports torch. Let it look less often.
"""

import gc

gc.set_threshold(100_000, 50, 1000)
