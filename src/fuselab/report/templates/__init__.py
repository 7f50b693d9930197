"""The sources of the HTML pages."""
