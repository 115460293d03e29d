"""Raw rows to canonical conversations, preference pairs and documents.

`reading` reads files, `layouts` makes rows canonical, and `selecting` cleans, deduplicates and splits them. The modules beside
these do the work of the stages: `assembly`, and what it calls, `first_pass`, `decisions` and `last_pass`. Large corpora are
read in parts, by the stages `read`, `decide` and `filter`; small ones by `corpus` alone.
"""
