"""Layers and trainers of other libraries; each module needs its library, and none is imported with the package."""
