"""Any pipeline, compiled stage by stage from the rules. Start at ``fuse``, then ``raw`` and ``prefix``."""
