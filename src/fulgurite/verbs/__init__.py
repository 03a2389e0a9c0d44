"""The extra commands as plain functions, usable from a notebook."""
