"""Callbacks: what goes along with a run without being part of the task."""
