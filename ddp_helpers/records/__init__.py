"""Read the records that runs leave in their folders: tables of runs, and how runs scale."""
