"""What reports are drawn with: words for figures, tables and sections, SVG axes, one style sheet.

Holds no report; those are `checkup.html` and `lab.html`.
"""
