"""Tools for anybody's script, log, job file, model or hang: audit, explain, fits, who-hangs."""
