"""Every use of a private torch module or attribute, in one folder. Tried on torch 2.11 and 2.13.

Each function says which private thing it needs and why no public one does.
"""
