"""Other daemons that this one watches."""
