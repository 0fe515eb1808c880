"""`zero-recipes rehearse`: the whole job with a small model, before it costs money."""

from zero_recipes.tools.rehearse.launches import rehearse

__all__ = ["rehearse"]
