"""The first GPU run: its steps, from outside and inside, and what they start on ranks."""
