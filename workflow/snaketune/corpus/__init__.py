"""Raw rows to canonical conversations and preference pairs: read (`reading`), made canonical (`layouts`), chosen (`selecting`).

What runs the stage stands above these, in the order of its work: corpus, scan, decisions, writing.
"""
