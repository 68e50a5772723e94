"""The operator's machine: the Click commands `ct` and `ies`, and what they call.

Depends on `evalworker.contract` for ids, key layout and wire types, and on `evalworker`'s small modules for storage and
queues. A worker never imports this package.
"""
