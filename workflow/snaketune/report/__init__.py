"""The report: HTML pages, figures and tables of all results."""
