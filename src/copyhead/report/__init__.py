"""Figures (line = theory, dots = experiment) and the self-contained report page."""
