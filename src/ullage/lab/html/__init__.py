"""The lab's page: results as one HTML file with inline SVG, light and dark, without any script.

`page.render` is the whole of it. Primitives of drawing and markup are `pages`'.
"""
