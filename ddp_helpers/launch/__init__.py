"""Start ranks on this machine, read their lines, leave none behind; write the scripts they run.

`launch` runs a script under a launcher, `ranks` cells on ranks that stay, and on forked ranks
`forked_call` a function and `forked_script` a script. `processes` ends all of them.
"""
