"""Raw memory and files: native copies, large pages, direct input and output, the page cache. No torch."""
