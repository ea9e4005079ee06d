"""The main module of each script; `launch.scripts` writes them out."""
