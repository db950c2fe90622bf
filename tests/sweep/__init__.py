"""The op sweep: every op of torch's OpInfo database, `unified` against eager, level by level."""
