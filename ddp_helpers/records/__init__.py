"""Read run folders: tables of runs, and models of how they scale."""
