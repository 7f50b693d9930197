"""Tables, plots, files and the HTML report."""
