"""Explain the log of a failed run of many ranks: who failed first, of what, and what to do.

`ddp-course explain` reads logs (`lines`, `prefixes`), matches them against `rules.toml`
(`rules`), reads what launchers say of endings (`endings`), lists both (`findings`), orders them
(`judge`), and reports.
It needs the standard library alone, and no network.
"""
