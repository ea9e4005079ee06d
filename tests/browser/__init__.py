"""JupyterLab as a learner has it, in a true browser: the server, and a notebook that is open in it."""
