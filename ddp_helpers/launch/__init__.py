"""Start ranks on this machine, read their lines, leave none behind.

One engine starts all: `server` has torch, and forks; `engine` asks it. On it stand `ranks` for
cells on ranks that stay, `forked_call` for a function, `forked_script` for a script, and
`programs`, with which `launch` runs a script under a launcher.
"""
