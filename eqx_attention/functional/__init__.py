"""Pure functions: no state, no modules."""
