"""Times this package side by side with others: `nox -s bench`."""
