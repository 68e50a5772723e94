"""A run's logs, read from the outside: headers, choice, state rows, dashboard files, promotion.

Called by the commands and the report. Nothing here reads samples where a header or the summaries suffice.
"""
