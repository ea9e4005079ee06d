"""Start ranks on this machine, read their output, leave no process behind.

One engine starts all of them: `server` has imported torch and forks; `engine` sends it requests.
`ranks` (cells on ranks that stay), `forked_call` (a function), `forked_script` (a script) and
`programs`, with which `launch` runs a script under a launcher, use this engine.
"""
