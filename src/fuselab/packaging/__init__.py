"""A user's own kernel as a kernel package, and a package in the forms that others can use."""
