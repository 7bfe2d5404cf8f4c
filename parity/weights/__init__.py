"""The conversion layer: named numpy arrays from one framework's layout to another's, and back. Needs no framework."""
