"""One module per layout: the columns that it reads, and how; a table of them; and the rows of a file by its layout.

No layout imports another: what several need is in `corpus.values`. `recognise` decides the layout of a file once, by its
columns, and `canonical` reads the rows.
"""
