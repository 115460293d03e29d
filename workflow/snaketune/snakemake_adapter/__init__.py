"""Snakemake, as the rules use it: no other package imports it. docs/upgrades.md lists what is undocumented of it."""
