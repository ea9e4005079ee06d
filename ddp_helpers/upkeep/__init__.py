"""What maintainers run: execute the course, measure it, keep its records."""
