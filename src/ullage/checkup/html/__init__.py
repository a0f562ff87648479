"""The report as one HTML file that opens without a network: `page.render(document)`.

Holds showing only: it reads the JSON document and nothing else, and computes no figure of its own.
"""
