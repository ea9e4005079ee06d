"""Start ranks on this machine, read their lines, leave none behind; and write out the scripts that they run."""
