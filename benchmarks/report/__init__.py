"""The records of a benchmark run, and the tables and figures made from them."""
