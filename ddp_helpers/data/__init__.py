"""The data, put on the disk once, by one process, before any rank starts."""
