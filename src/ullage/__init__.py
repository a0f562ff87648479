"""ullage: what a Transformer is, what it costs, and what is still free while it runs.

Importing the package imports nothing heavy; the rooms are imported by those who need them.
"""

__version__ = "0.1.0"
