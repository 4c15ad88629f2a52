"""Other daemons that one watches."""
