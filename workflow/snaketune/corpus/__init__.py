"""Raw rows to canonical conversations, preference pairs and documents.

`reading` reads files, `layouts` makes rows canonical, and `selecting` cleans, deduplicates and splits them. The modules
beside these run the stage: corpus, assembly, first_pass, decisions, last_pass.
"""
