"""Learning tasks a configuration can name."""

from fulgurite.tasks.classification import ClassificationTask

__all__ = ["ClassificationTask"]
