"""Pages: self-contained HTML for people who have never seen the project.

    report.py, replay.py     what a page says, made of the document of `-o json`
        html.py              the frame: style sheet, sections, tables, bars in cells, writing the file
        svg.py               plots over time and over capacity, as inline SVG

A page is one file: no script, no font, no image, nothing from the network. It follows the
reader's light or dark setting; each plot has its figures beside it as a table, and says what
a shape stands for when pointed at. Every text goes through `html.escape`: names of models
and tenants come from clients.
"""
